"""Whether the scheduler could ever run a request, asked before a run folder exists."""
