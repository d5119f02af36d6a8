"""Example jobs, one file each."""
