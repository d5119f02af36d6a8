"""A run's folder: its names, the one door to its files, their digests."""
