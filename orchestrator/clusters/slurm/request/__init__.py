"""A SLURM request as text: the batch script, its srun, and what may stand in them."""
