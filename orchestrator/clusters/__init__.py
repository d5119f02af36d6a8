"""Places to run: the interface (`api`), simulated nodes (`local`), SLURM (`slurm`)."""
