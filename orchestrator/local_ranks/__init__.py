"""Ranks without a launcher, for tests and notebooks: threads or processes of this machine."""
