"""Places to run: the seam (`api`), pretended nodes (`local`), SLURM (`slurm`)."""
