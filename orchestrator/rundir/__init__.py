"""Files of a run: the only state that outlives a process."""
