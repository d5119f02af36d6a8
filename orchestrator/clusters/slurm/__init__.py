"""SLURM: a request becomes a batch script, and is found again by its job id."""
