"""Starting a run, following it, looking at it and stopping it, from any shell."""
