"""Requests that a scheduler could never run, by its own answers. Nothing is started."""

import pytest

from orchestrator.clusters.slurm.admission import (
    Wanted,
    misfit,
    preempt_grace_s,
    read_partitions,
    read_test_only,
)
from orchestrator.slurm_client import Answer

PARTITIONS = (
    "PartitionName=main AllowGroups=ALL Default=YES GraceTime=0 MaxNodes=UNLIMITED "
    "MaxTime=UNLIMITED PreemptMode=OFF State=UP TotalNodes=4\n"
    "PartitionName=low Default=NO GraceTime=20 MaxNodes=2 MaxTime=1-00:00:00 "
    "PreemptMode=REQUEUE State=UP TotalNodes=4\n"
    "PartitionName=old Default=NO GraceTime=0 MaxNodes=UNLIMITED MaxTime=30:00 PreemptMode=OFF "
    "State=DOWN TotalNodes=4\n"
    "PartitionName=shut Default=NO GraceTime=0 MaxNodes=UNLIMITED MaxTime=UNLIMITED "
    "PreemptMode=OFF State=DRAIN TotalNodes=4\n"
)


def test_partitions_are_read_with_their_limits():
    found = read_partitions(PARTITIONS)
    assert found["main"].is_default
    assert found["main"].minutes is None
    low = found["low"]
    assert (low.max_nodes, low.minutes, low.grace_s) == (2, 1440, 20)
    assert not found["old"].up
    assert found["old"].open
    assert not found["shut"].open


def test_what_a_partition_never_gives_is_found_although_slurm_would_take_it():
    found = read_partitions(PARTITIONS)
    assert misfit(Wanted(nodes=2), found["low"]) is None
    assert "gives 2 at most" in misfit(Wanted(nodes=3), found["low"])
    assert "try cluster.time_min=1440" in misfit(Wanted(minutes=1441), found["low"])
    assert misfit(Wanted(), found["old"]) is None  # it is down, not closed: a job waits there
    assert "takes no jobs" in misfit(Wanted(), found["shut"])


class Client:
    """Answers as sacctmgr, one table for associations and one for qos."""

    def __init__(self, *qualities, default=""):
        self.tables = {"assoc": [default], "qos": qualities}

    def ask(self, *command, **_):
        return Answer(0, "".join(f"{row}\n" for row in self.tables[command[3]]), "")


BY_PARTITION, BY_QOS = "preempt/partition_prio", "preempt/qos"
# As sacctmgr prints Name, GraceTime and Preempt.
QUALITIES = ("normal|00:00:00|", "low|00:00:15|", "high|00:00:00|low,scavenge")


@pytest.mark.parametrize(
    ("kind", "mode", "qos", "client", "grace"),
    [
        (BY_PARTITION, "REQUEUE", None, Client(), 20),
        (BY_PARTITION, "GANG,SUSPEND", None, Client(), None),  # it continues later
        ("preempt/none", "REQUEUE", "low", Client(*QUALITIES), None),
        (BY_QOS, "REQUEUE", "low", Client(*QUALITIES), 15),
        (BY_QOS, "REQUEUE", "normal", Client(*QUALITIES), None),
        (BY_QOS, "REQUEUE", None, Client(*QUALITIES, default="low"), 15),
        (BY_QOS, "REQUEUE", None, Client(*QUALITIES), None),
        (BY_QOS, "REQUEUE", "low", Client(), None),
    ],
)
def test_the_notice_of_a_preemption_is_that_of_the_partition_or_of_the_qos(
    kind, mode, qos, client, grace
):
    known = read_partitions(PARTITIONS.replace("PreemptMode=REQUEUE", f"PreemptMode={mode}"))
    settings = {"PreemptType": kind}
    assert preempt_grace_s(client, settings, Wanted(qos=qos), [known["low"]]) == grace


KNOWN = read_partitions(
    "PartitionName=main Default=YES TotalNodes=3 MaxTime=UNLIMITED State=UP\n"
    "PartitionName=low Default=NO TotalNodes=3 MaxTime=UNLIMITED State=UP\n"
    "PartitionName=short Default=NO TotalNodes=3 MaxTime=00:01:00 State=UP\n"
)  # fmt: skip
TAKEN = "Job 1 to start at 2026-11-22T05:56:20 using 2 processors on nodes n[0-1] in partition low"


def placed(answer, *partitions):
    return read_test_only(answer, Wanted(partitions=partitions), KNOWN)


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
