"""Checks whether the scheduler could ever run a request, before a run folder exists.

A job is refused if it can never run: by the limits of its partitions, or because it names something
that does not exist. Sites with EnforcePartLimits=NO would accept such a job and leave it pending
for ever. Everything else is advice, including the answer of `sbatch --test-only`: with nodes
drained or reserved it refuses jobs that sbatch queues. Resources that no node has are left to
sbatch, which refuses them, and limits of accounting to the scheduler: a job that waits for them
says so in its reason.
"""

from __future__ import annotations

import getpass
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.clusters.api import Admission
from orchestrator.clusters.slurm.scheduler import Answer, SlurmClient, explained
from orchestrator.errors import ClusterError, did_you_mean
from orchestrator.units import seconds

PARTITIONS = ("scontrol", "--all", "--oneliner", "show", "partition")
ACCOUNTING_S = 15.0
KILL_WAIT_S = 30.0  # SLURM's default
# Printed for a job that sbatch --test-only accepts; all other output is the site's.
PLACED = re.compile(r"Job \d+ to start at .* in partition (\S+)")
# sbatch's messages on missing things and wrong options; waiting would not help.
NEVER = re.compile(
    r"invalid .*specif|invalid (partition|account)|reservation is invalid|mutually exclusive"
    r"|unrecognized option|dependency problem",
    re.IGNORECASE,
)
TAKEN_ALL_THE_SAME = "(the scheduler would accept the job, which would wait forever)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A partition's relevant settings.

    Attributes:
        state: as SLURM names it.
        minutes, max_nodes: its limits for one job.
        default_minutes: the time limit of a job that states none.
        grace_s: between a preempting signal and the end; None without preemption.
    """

    name: str
    nodes: int
    is_default: bool
    state: str
    minutes: float | None
    default_minutes: float | None
    max_nodes: int | None
    grace_s: int | None

    @property
    def open(self) -> bool:
        """Return whether it accepts jobs into its queue."""
        return self.state in ("UP", "DOWN")


def read_partitions(text: str) -> dict[str, Partition]:
    """Parse the answer of `PARTITIONS`."""
    partitions: dict[str, Partition] = {}
    for line in text.splitlines():
        fields = dict(w.split("=", 1) for w in line.split() if "=" in w)
        if "PartitionName" not in fields:
            continue
        name = fields["PartitionName"]
        # A suspended job continues later; it gets no stop signal.
        preempted = {"REQUEUE", "CANCEL"} & set(fields.get("PreemptMode", "").split(","))
        partitions[name] = Partition(
            name=name,
            nodes=int(fields.get("TotalNodes", "0")),
            is_default=fields.get("Default") == "YES",
            state=fields.get("State", "UP"),
            minutes=_minutes(fields.get("MaxTime", "")),
            default_minutes=_minutes(fields.get("DefaultTime", ""))
            or _minutes(fields.get("MaxTime", "")),
            max_nodes=int(fields["MaxNodes"]) if fields.get("MaxNodes", "").isdigit() else None,
            grace_s=int(fields.get("GraceTime", "0")) if preempted else None,
        )
    return partitions


def _minutes(span: str) -> float | None:
    duration_s = seconds(span)
    return None if duration_s is None else duration_s / 60


def check_request(
    client: SlurmClient, options: Mapping[str, object], nodes: int, script: str
) -> Admission:
    """Refuse jobs that can never run. Raises `ClusterError`; `SchedulerDown` without an answer.

    Args:
        options: of the #SBATCH lines.
        nodes: the least.

    Returns:
        The scheduler's answer; its `notice` has `preempt_grace_s` (GraceTime, None without
        preemption), `kill_wait_s` (KillWait, which follows it), and `time_limit_s` (None without).
    """
    answer = client.run("sbatch", "--test-only", text=script)
    settings, known = client.settings(), read_partitions(client.check_output(*PARTITIONS))
    names = [name for name in str(options.get("partition", "")).split(",") if name]
    message, warnings = answer.message.removeprefix("sbatch: "), []
    if answer.code == 0 and (placed := PLACED.search(answer.message)):
        lines = [line.removeprefix("sbatch: ") for line in answer.message.splitlines()]
        message = placed[0]
        warnings = [f"sbatch says: {line}" for line in lines if message not in line]
        names = [placed[1]]  # the site may place a job in another partition than in one of those
    chosen = [known[name] for name in names if name in known]
    if not names:
        chosen = [partition for partition in known.values() if partition.is_default]
    against = [
        f"cluster.partition={','.join(names)}: this cluster has no partition "
        f"'{name}'{did_you_mean(name, known)}"
        for name in names
        if name not in known
    ]
    minutes = _minutes(str(options.get("time", "")))
    misfits = [misfit(partition, nodes, minutes) for partition in chosen]
    if all(misfits):
        against += filter(None, misfits)
    if against or (answer.code and NEVER.search(answer.message)):
        refused = (
            [explained(answer.message), *against] if answer.code else [*against, TAKEN_ALL_THE_SAME]
        )
        raise ClusterError("\n".join(refused))
    limits = [
        limit
        for partition in chosen
        if (limit := partition.default_minutes if minutes is None else minutes) is not None
    ]
    return Admission(
        message=message,
        warnings=(*warnings, *_possible_delays(answer, chosen)),
        notice={
            "preempt_grace_s": preempt_grace_s(client, settings, options.get("qos"), chosen),
            "kill_wait_s": float(settings["KillWait"].split()[0])  # as in "30 sec"
            if "KillWait" in settings
            else KILL_WAIT_S,
            "time_limit_s": 60 * min(limits) if limits else None,
        },
    )


def misfit(partition: Partition, nodes: int, minutes: float | None) -> str | None:
    """Return why a job can never run in a partition; None if it can.

    Other limits are left to sbatch, whose message is then the warning or the refusal.
    """
    name = f"partition {partition.name}"
    most = min(partition.nodes, partition.max_nodes or partition.nodes)
    if nodes > most:
        return f"cluster.nodes={nodes}, but {name} gives {most} at most"
    limit = partition.minutes
    if minutes is not None and limit is not None and minutes > limit:
        return (
            f"cluster.time_min={minutes:g}, but {name} allows {limit:g} minutes; try "
            f"cluster.time_min={limit:g} (a run that needs longer is requeued and goes on)"
        )
    if not partition.open:
        return f"{name} takes no jobs (it is inactive or being drained)"
    return None


def _possible_delays(answer: Answer, partitions: list[Partition]) -> Iterator[str]:
    """Yield the reasons that may keep the job waiting at present."""
    if answer.code:
        yield (
            f"the scheduler cannot place the job at present ({answer.message}): sbatch will "
            f"refuse it if a limit or the size of all nodes rules it out, and otherwise queue it, "
            f"to wait for nodes that are down, drained, reserved or not heard of yet"
        )
    if partitions and not any(partition.state == "UP" for partition in partitions):
        names = ", ".join(partition.name for partition in partitions)
        yield f"partition {names} starts no jobs at present (it is down); the job will wait"


def preempt_grace_s(
    client: SlurmClient, settings: Mapping[str, str], qos: object, partitions: list[Partition]
) -> float | None:
    """Return seconds from a preemption's signal to SIGTERM; None without preemption.

    Args:
        settings: say whether the partition or the qos decides it.
    """
    kind = settings.get("PreemptType")
    if kind == "preempt/none":
        return None
    if kind != "preempt/qos":
        return min((float(p.grace_s) for p in partitions if p.grace_s is not None), default=None)

    def rows(*command: str, fields: Sequence[str]) -> list[list[str]]:
        form = f"format={','.join(fields)}"
        answer = client.run("sacctmgr", "-nP", "show", *command, form, timeout_s=ACCOUNTING_S)
        table = [line.split("|") for line in answer.out.splitlines()] if not answer.code else []
        return [row for row in table if len(row) == len(fields)]  # a wrapper may print more

    if not qos:
        user = getpass.getuser()
        own = rows("assoc", "where", f"user={user}", fields=("User", "DefaultQOS"))
        qos = next((qos for name, qos in own if name.lower() == user.lower() and qos), "normal")
    name = str(qos).lower()
    known = rows("qos", fields=("Name", "GraceTime", "Preempt"))
    if not any(name in preempts.lower().split(",") for _, _, preempts in known):
        return None
    return next((seconds(grace) for other, grace, _ in known if other == name), None)
