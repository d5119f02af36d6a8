"""A rehearsal whose runs are jobs of SLURM, hurt by a hand on each of their nodes."""
