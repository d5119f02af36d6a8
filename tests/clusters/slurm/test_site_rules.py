"""A site's job_submit plugin may move a job and speak to the person: neither is lost."""

import pytest

from orchestrator.clusters.slurm.admission import (
    Wanted,
    chosen_partitions,
    read_partitions,
    read_test_only,
)
from orchestrator.slurm_client import Answer

KNOWN = read_partitions(
    "PartitionName=main Default=YES TotalNodes=3 MaxTime=UNLIMITED State=UP\n"
    "PartitionName=low Default=NO TotalNodes=3 MaxTime=UNLIMITED State=UP\n"
    "PartitionName=short Default=NO TotalNodes=3 MaxTime=00:01:00 State=UP\n", ""
)  # fmt: skip
TAKEN = "Job 1 to start at 2026-11-22T05:56:20 using 2 processors on nodes n[0-1] in partition low"


def placed(answer, *partitions):
    job = Wanted(partitions=partitions)
    return read_test_only(answer, job, chosen_partitions(job, KNOWN), KNOWN)


@pytest.mark.parametrize("asked", [(), ("main",), ("short", "main"), ("mian",)])
def test_a_job_is_held_to_the_limits_of_the_partition_that_the_site_moves_it_to(asked):
    words = f"sbatch: jobs of this site go to low\nsbatch: {TAKEN}\n"
    job, said, told = placed(Answer(0, "", words), *asked)
    assert job.partitions == ("low",)
    assert said == TAKEN
    assert told == [
        "sbatch says: jobs of this site go to low",
        f"this site places the job in partition low, not in {','.join(asked) or 'the default'}",
    ]


@pytest.mark.parametrize(
    "answer", [Answer(0, "", f"sbatch: {TAKEN}\n"), Answer(1, "", f"sbatch: error: no\n{TAKEN}")]
)
def test_a_job_that_stays_where_it_was_meant_to_be_is_told_of_nothing(answer):
    job, _, told = placed(answer, "short", "low")
    assert (job.partitions, told) == (("short", "low"), [])
