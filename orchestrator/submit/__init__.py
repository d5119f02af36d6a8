"""Placing a run: requests as values, the local cluster, SLURM."""
