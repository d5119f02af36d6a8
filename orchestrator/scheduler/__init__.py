"""SLURM's commands, run in one place and read into values; below clusters and ranks."""
