"""How a SLURM job ends: after srun, by whoever looks later, and in whose name."""
