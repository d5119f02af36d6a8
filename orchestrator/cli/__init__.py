"""What the commands do before a run is known: flags, composing, completion."""
