"""Points of a sweep that run on this machine, as many beside each other as it has room for."""
