"""What a site's own rules (job_submit plugins) make of a job: its partition, and what they say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from orchestrator.clusters.slurm.admission.limits import Wanted
from orchestrator.clusters.slurm.admission.partitions import Partition
from orchestrator.scheduler.client import Answer

# Of a job that sbatch --test-only would take; all else that it prints then is the site's own.
PLACED = re.compile(r"Job \d+ to start at .* in partition (\S+)")


def as_placed(
    answer: Answer, job: Wanted, chosen: list[Partition], known: Mapping[str, Partition]
) -> tuple[Wanted, str, list[str]]:
    """Read the answer of `sbatch --test-only`.

    Args:
        chosen: the partitions that the job would have without such rules.

    Returns:
        The job in the partition that its limits are those of; sbatch's sentence; what else is to
        be told.
    """
    said = PLACED.search(answer.words) if answer.code == 0 else None
    if said is None:
        return job, answer.words.removeprefix("sbatch: "), []
    lines = [line.removeprefix("sbatch: ") for line in answer.words.splitlines()]
    told = [f"sbatch says: {line}" for line in lines if said[0] not in line]
    partition = said[1]
    if partition in known and known[partition] not in chosen:
        names = ",".join(job.partitions) or "the default"
        told.append(f"this site places the job in partition {partition}, not in {names}")
        job = replace(job, partitions=(partition,))
    return job, said[0], told
