"""An environment that another scheduler or launcher has left nothing in."""

from __future__ import annotations

from collections.abc import Mapping

FOREIGN_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "SUBMITIT_")
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def clean_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without what another scheduler or launcher may have left in it."""
    return {k: v for k, v in env.items() if not k.startswith(FOREIGN_PREFIXES) and k not in FOREIGN}
