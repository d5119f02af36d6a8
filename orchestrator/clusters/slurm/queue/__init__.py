"""What is in SLURM's queue: put there once, as arrays, in turn; and taken out of it."""
