"""Example jobs, one file each: what a user writes."""
