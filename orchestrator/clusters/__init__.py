"""Places to run: the seam (`api`), simulated nodes (`local`), SLURM (`slurm`)."""
