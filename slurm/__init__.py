"""A real SLURM on one machine, for people who have no cluster at hand; see README.md."""
