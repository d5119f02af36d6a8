"""An environment that another scheduler or launcher has left nothing in."""

from __future__ import annotations

from collections.abc import Mapping

FOREIGN_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "SUBMITIT_")
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def clean_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without what another scheduler or launcher may have left in it."""
    return {k: v for k, v in env.items() if not k.startswith(FOREIGN_PREFIXES) and k not in FOREIGN}


def own_job_id(env: Mapping[str, str]) -> str:
    """The id of the job that this is, in SLURM's environment; "0" where there is none.

    An element of an array is told by its array: the number in SLURM_JOB_ID is its own in most
    elements, but in one of them that of the whole array, which would be requeued or ended with it.

    >>> own_job_id({"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"})
    '7_3'
    """
    if "SLURM_ARRAY_JOB_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID", "0")
