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
import math
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from orchestrator.config.schema import SIGNAL_AHEAD_S, Config
from orchestrator.errors import ClusterError, did_you_mean
from orchestrator.slurm_client import Answer, SlurmClient, explained, seconds

PARTITIONS = ("scontrol", "--all", "--oneliner", "show", "partition")


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A partition's relevant settings.

    Attributes:
        state: as SLURM names it.
        minutes, min_nodes, max_nodes, max_cpus: its limits for one job: of wall time, of nodes, and
            of CPUs of each node.
        grace_s: between a preempting signal and the end; None without preemption.
        listed: its nodes in SLURM's notation.
        excluded: number of nodes that the job excludes; `nodes` is without these.
    """

    name: str
    nodes: int
    is_default: bool
    state: str
    minutes: float | None
    min_nodes: int
    max_nodes: int | None
    max_cpus: int | None
    grace_s: int | None
    listed: str = ""
    excluded: int = 0

    @property
    def up(self) -> bool:
        """Return whether it starts jobs at present."""
        return self.state == "UP"

    @property
    def open(self) -> bool:
        """Return whether it accepts jobs into its queue."""
        return self.state in ("UP", "DOWN")


def minutes(text: str) -> float | None:
    """Parse SLURM's time limits to minutes: `90`, `1:30:00`, `1-12`, `30:00`; None for no limit.

    >>> minutes("90"), minutes("1:30:00"), minutes("1-12"), minutes("UNLIMITED")
    (90.0, 90.0, 2160.0, None)
    """
    if text.strip().isdigit():
        return float(text)
    if found := re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?", text.strip()):
        return int(found[1]) * 1440.0 + int(found[2]) * 60 + int(found[3] or 0)
    span = seconds(text)
    return None if span is None else span / 60


def read_partitions(text: str) -> dict[str, Partition]:
    """Parse the answer of `PARTITIONS`."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        words = dict(w.split("=", 1) for w in line.split() if "=" in w)
        if "PartitionName" not in words:
            continue
        name = words["PartitionName"]
        # A suspended job continues later; it gets no stop signal.
        preempted = {"REQUEUE", "CANCEL"} & set(words.get("PreemptMode", "").split(","))
        found[name] = Partition(
            name=name,
            nodes=int(words.get("TotalNodes", "0")),
            is_default=words.get("Default") == "YES",
            state=words.get("State", "UP"),
            minutes=minutes(words.get("MaxTime", "")),
            min_nodes=_count_or_none(words.get("MinNodes", "")) or 0,
            max_nodes=_count_or_none(words.get("MaxNodes", "")),
            max_cpus=_count_or_none(words.get("MaxCPUsPerNode", "")),
            grace_s=int(words.get("GraceTime", "0")) if preempted else None,
            listed=words.get("Nodes", "").replace("(null)", ""),
        )
    return found


def _count_or_none(text: str) -> int | None:
    return int(text) if text.isdigit() else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A job's request, as far as limits apply to it.

    Attributes:
        partitions: () for the cluster's default.
        nodes, most_nodes: the minimum, and the wanted number.
        cpus: of each node.
        minutes: of wall time; None leaves it to the partition.
        exclude: nodes that it excludes, in SLURM's notation.
    """

    partitions: tuple[str, ...] = ()
    qos: str | None = None
    nodes: int = 1
    most_nodes: int = 1
    cpus: int = 1
    minutes: float | None = None
    exclude: str | None = None


def wanted(options: Mapping[str, object], *, nodes: tuple[int, int], cpus: int) -> Wanted:
    """Return the request that the #SBATCH options make.

    Args:
        nodes: the least and the most.
        cpus: of a node, for all of its ranks.
    """

    def text(name: str) -> str | None:
        return str(options[name]) if options.get(name) not in (None, True, False) else None

    return Wanted(
        partitions=tuple(name for name in (text("partition") or "").split(",") if name),
        qos=text("qos"),
        nodes=nodes[0],
        most_nodes=nodes[1],
        cpus=0 if "overcommit" in options else cpus,
        minutes=minutes(text("time") or ""),
        exclude=text("exclude"),
    )


def misfit(job: Wanted, partition: Partition) -> str | None:
    """Return why a job can never run in a partition; None if it can."""
    name = f"partition {partition.name}"
    most = min(partition.nodes, partition.max_nodes or partition.nodes)
    if job.nodes > most:
        without = f" without the {partition.excluded} of cluster.exclude"
        return f"cluster.nodes={job.nodes}, but {name} gives {most} at most" + (
            without if partition.excluded else ""
        )
    if job.most_nodes < partition.min_nodes:
        least = partition.min_nodes
        return f"cluster.nodes={job.most_nodes}, but {name} gives {least} at least"
    if partition.max_cpus is not None and job.cpus > partition.max_cpus:
        return (
            f"cluster.ranks_per_node x cluster.cpus_per_rank is {job.cpus}, but {name} gives "
            f"{partition.max_cpus} CPUs of a node at most"
        )
    limit = partition.minutes
    if job.minutes is not None and limit is not None and job.minutes > limit:
        return (
            f"cluster.time_min={job.minutes:g}, but {name} allows {limit:g} minutes; try "
            f"cluster.time_min={limit:g} (a run that needs longer is requeued and goes on)"
        )
    if not partition.open:
        return f"{name} takes no jobs (it is inactive or being drained)"
    return None


# Printed for a job that sbatch --test-only accepts; all other output is the site's.
PLACED = re.compile(r"Job \d+ to start at .* in partition (\S+)")


def read_test_only(
    answer: Answer, job: Wanted, chosen: list[Partition], known: Mapping[str, Partition]
) -> tuple[Wanted, str, list[str]]:
    """Read the answer of `sbatch --test-only`.

    Args:
        chosen: the job's partitions without such rules.

    Returns:
        The job in the partition whose limits apply; sbatch's sentence; further messages.
    """
    said = PLACED.search(answer.words) if answer.code == 0 else None
    if said is None:
        return job, answer.words.removeprefix("sbatch: "), []
    lines = [line.removeprefix("sbatch: ") for line in answer.words.splitlines()]
    messages = [f"sbatch says: {line}" for line in lines if said[0] not in line]
    partition = said[1]
    if partition in known and known[partition] not in chosen:
        names = ",".join(job.partitions) or "the default"
        messages.append(f"this site places the job in partition {partition}, not in {names}")
        job = replace(job, partitions=(partition,))
    return job, said[0], messages


ACCOUNTING_S = 15.0
KILL_WAIT = re.compile(r"^KillWait\s*=\s*(\d+)", re.MULTILINE)
PREEMPT_TYPE = re.compile(r"^PreemptType\s*=\s*preempt/(\w+)", re.MULTILINE)
DEFAULT_KILL_WAIT_S = 30.0
# sbatch's messages on missing things; waiting would not create them.
NEVER = (
    "invalid partition", "invalid account", "invalid qos", "invalid generic resource",
    "invalid feature", "invalid node name", "reservation is invalid",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The scheduler's answer to a request that it accepts.

    Attributes:
        words: its message.
        warnings: what may keep the job waiting, a sentence each.
        preempt_grace_s: GraceTime; None without preemption.
        kill_wait_s: KillWait, which follows it.
    """

    words: str
    warnings: tuple[str, ...] = ()
    preempt_grace_s: float | None = None
    kill_wait_s: float = DEFAULT_KILL_WAIT_S

    def grace_s(self, config: Config) -> float:
        """Return for how long the job lives after a stop signal at least.

        A requeue by hand and a node set down give only `kill_wait_s`; they do not count here.
        """
        ahead = float(config.cluster.signal_ahead_s or SIGNAL_AHEAD_S)
        preempted = self.preempt_grace_s
        return ahead if preempted is None else min(ahead, preempted + self.kill_wait_s)


def chosen_partitions(job: Wanted, known: Mapping[str, Partition]) -> list[Partition]:
    """Return the existing ones of the named partitions, or the default."""
    if not job.partitions:
        return [p for p in known.values() if p.is_default]
    return [known[name] for name in job.partitions if name in known]


def preempt_grace_s(
    client: SlurmClient, settings: str, job: Wanted, partitions: list[Partition]
) -> float | None:
    """Return seconds from a preemption's signal to SIGTERM; None without preemption.

    Args:
        settings: `scontrol show config`: whether the partition or the qos decides it.
    """
    kind = PREEMPT_TYPE.search(settings)
    if kind is not None and kind[1] == "none":
        return None
    if kind is None or kind[1] != "qos":
        return min((float(p.grace_s) for p in partitions if p.grace_s is not None), default=None)
    return _grace_of_qos(client, job.qos)


def _grace_of_qos(client: SlurmClient, qos: str | None) -> float | None:
    """Return GraceTime of the job's qos, in seconds, if another may preempt it."""

    def rows(*command: str) -> list[list[str]]:
        answer = client.ask("sacctmgr", "-nP", "show", *command, timeout_s=ACCOUNTING_S)
        return [line.split("|") for line in answer.out.splitlines()] if not answer.code else []

    if qos is None:
        own = rows("assoc", "where", f"user={getpass.getuser()}", "format=DefaultQOS")
        qos = next((row[0] for row in own if row[0]), "normal")
    known = {name: (grace, preempts) for name, grace, preempts in
             rows("qos", "format=Name,GraceTime,Preempt")}  # fmt: skip
    if not any(qos.lower() in preempts.lower().split(",") for _, preempts in known.values()):
        return None
    return seconds(known[qos.lower()][0]) if qos.lower() in known else None


def read_kill_wait_s(settings: str) -> float:
    r"""Return KillWait of `scontrol show config`: seconds between SIGTERM and SIGKILL.

    >>> read_kill_wait_s("KillOnBadExit = 0\nKillWait                = 30 sec\n")
    30.0
    """
    found = KILL_WAIT.search(settings)
    return float(found[1]) if found else DEFAULT_KILL_WAIT_S


def too_slow(config: Config, grace: float) -> str | None:
    """Return a sentence if an update is known to take longer than a stop may."""
    update_s = config.facts.update_s
    if update_s is None or update_s <= grace:
        return None
    return (
        f"an update takes {update_s:g} s (facts.update_s), longer than the {grace:g} s between the "
        f"scheduler's signal and the end: a stop will lose the window under way; "
        f"cluster.signal_ahead_s={math.ceil(update_s)} gives it time before a time limit, fewer "
        f"accumulation.steps also when preempted"
    )


def _without_excluded(
    client: SlurmClient, exclude: str | None, known: Mapping[str, Partition]
) -> Mapping[str, Partition]:
    """Return the partitions without the excluded nodes."""
    if exclude is None:
        return known

    def names(listed: str) -> set[str]:
        answer = client.ask("scontrol", "show", "hostnames", listed)
        return set(answer.out.split()) if not answer.code else set()

    excluded = names(exclude)
    found: dict[str, Partition] = {}
    for name, partition in known.items():
        count = len(excluded & names(partition.listed)) if partition.listed else 0
        found[name] = replace(partition, nodes=partition.nodes - count, excluded=count)
    return found


def _against_partitions(job: Wanted, known: Mapping[str, Partition]) -> Iterator[str]:
    """Return why no partition of the job can ever run it."""
    for name in job.partitions:
        if name not in known:
            yield (
                f"cluster.partition={','.join(job.partitions)}: this cluster has no partition "
                f"'{name}'{did_you_mean(name, known)}"
            )
    against = [misfit(job, partition) for partition in chosen_partitions(job, known)]
    if all(against):
        yield from (sentence for sentence in against if sentence)


def check_request(client: SlurmClient, job: Wanted, script: str) -> Verdict:
    """Refuse jobs that can never run. Raises `ClusterError`; `SchedulerDown` without an answer."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        shown = pool.submit(client.must, "scontrol", "show", "config")
        tested = pool.submit(client.ask, "sbatch", "--test-only", text=script)
        known = read_partitions(client.must(*PARTITIONS))
        known = _without_excluded(client, job.exclude, known)
        answer, settings = tested.result(), shown.result()
    job, words, warnings = read_test_only(answer, job, chosen_partitions(job, known), known)
    partitions = chosen_partitions(job, known)
    against = list(_against_partitions(job, known))
    if against or (answer.code and any(words in answer.words.lower() for words in NEVER)):
        said = explained(answer.words) if answer.code else TAKEN_ALL_THE_SAME
        raise ClusterError("\n".join([said, *against] if answer.code else [*against, said]))
    warnings += _possible_delays(answer, partitions)
    return Verdict(
        words=words,
        warnings=tuple(warnings),
        preempt_grace_s=preempt_grace_s(client, settings, job, partitions),
        kill_wait_s=read_kill_wait_s(settings),
    )


TAKEN_ALL_THE_SAME = "(the scheduler would take the job all the same, to wait for ever)"


def _possible_delays(answer: Answer, partitions: list[Partition]) -> Iterator[str]:
    """Yield what may keep the job waiting at present."""
    if answer.code:
        yield (
            f"the scheduler cannot place the job at present ({answer.words}); nothing that is "
            f"configured stands against it, so it is queued, to wait for nodes that are down, "
            f"drained, reserved or not heard of yet"
        )
    if partitions and not any(partition.up for partition in partitions):
        names = ", ".join(partition.name for partition in partitions)
        yield f"partition {names} starts no jobs at present (it is down); the job will wait"
