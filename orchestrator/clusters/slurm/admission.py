"""Checks whether the scheduler could ever run a request, before a run folder exists.

A job is refused if it can never run: by the limits of its partitions and their nodes, by the
limits of accounting where they are enforced, or because it names something that does not exist.
Sites with EnforcePartLimits=NO would accept such a job and leave it pending for ever. Everything
else is advice, including the answer of `sbatch --test-only`: with nodes drained or reserved it
refuses jobs that sbatch queues.
"""

from __future__ import annotations

import getpass
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from orchestrator.config.schema import SIGNAL_AHEAD_S, Config
from orchestrator.errors import ClusterError, did_you_mean
from orchestrator.slurm_client import Answer, SchedulerDown, SlurmClient, explained, seconds

SHAPES = ("sinfo", "-a", "-h", "-e", "-o", "%R|%D|%c|%m|%G")
PARTITIONS = ("scontrol", "--all", "--oneliner", "show", "partition")
COUNT = re.compile(r"(\d+)([KMGT]?)")

Gres = dict[tuple[str, str], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Identical nodes of a partition: their number and resources."""

    nodes: int
    cpus: int
    memory_mb: int
    gres: Gres


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowed:
    """A partition's limits for one job: minutes of wall time, nodes, and CPUs of each of them."""

    minutes: float | None
    max_nodes: int | None
    min_nodes: int
    max_cpus: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A partition's relevant settings.

    Attributes:
        state: as SLURM names it.
        grace_s: between a preempting signal and the end; None without preemption.
        shapes: of its nodes; empty if they were not read.
        listed: its nodes in SLURM's notation.
        excluded: number of nodes that the job excludes; `nodes` is without these.
    """

    name: str
    nodes: int
    is_default: bool
    state: str
    allows: Allowed
    grace_s: int | None
    qos: str | None = None
    shapes: tuple[Shape, ...] = ()
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


def megabytes(text: str) -> int:
    """Parse SLURM's sizes, without a unit MB; 0 if there is none.

    >>> megabytes("16384"), megabytes("2G"), megabytes("")
    (16384, 2048, 0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", text.strip().rstrip("+").upper())
    factor = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}
    return int(float(found[1]) * factor[found[2]]) if found else 0


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


def read_gres(text: str) -> Gres:
    """Parse `gpu:a100:4(S:0-1),npu:8` to counts by (name, type); the type is "" without one.

    >>> read_gres("gpu:a100:4(S:0-1),npu:8"), read_gres("(null)")
    ({('gpu', 'a100'): 4, ('npu', ''): 8}, {})
    """
    found: Gres = {}
    for part in re.sub(r"\([^)]*\)", "", text.replace("gres/", "").replace("gres:", "")).split(","):
        words = part.strip().replace("=", ":").split(":")
        size = COUNT.fullmatch(words[-1])
        count = (
            int(words.pop().rstrip("KMGT")) * 1024 ** " KMGT".index(size[2] or " ") if size else 1
        )
        if words and words[0] not in ("", "none", "null"):
            key = (words[0], words[1] if len(words) > 1 else "")
            found[key] = found.get(key, 0) + count
    return found


def read_partitions(text: str, shapes: str = "") -> dict[str, Partition]:
    """Parse the answers of `PARTITIONS` and `SHAPES`."""
    alike = _read_shapes(shapes)
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        words: Mapping[str, str] = dict(w.split("=", 1) for w in line.split() if "=" in w)
        if "PartitionName" not in words:
            continue
        partition = _read_partition(words)
        found[partition.name] = replace(partition, shapes=tuple(alike.get(partition.name, ())))
    return found


def _read_partition(words: Mapping[str, str]) -> Partition:
    qos = words.get("QoS", "N/A")
    # A suspended job continues later; it gets no stop signal.
    preempted = {"REQUEUE", "CANCEL"} & set(words.get("PreemptMode", "").split(","))
    return Partition(
        name=words["PartitionName"],
        nodes=int(words.get("TotalNodes", "0")),
        is_default=words.get("Default") == "YES",
        state=words.get("State", "UP"),
        allows=Allowed(
            minutes=minutes(words.get("MaxTime", "")),
            max_nodes=_count_or_none(words.get("MaxNodes", "")),
            min_nodes=_count_or_none(words.get("MinNodes", "")) or 0,
            max_cpus=_count_or_none(words.get("MaxCPUsPerNode", "")),
        ),
        grace_s=int(words.get("GraceTime", "0")) if preempted else None,
        qos=None if qos in ("N/A", "") else qos,
        listed=words.get("Nodes", "").replace("(null)", ""),
    )


def _count_or_none(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _read_shapes(text: str) -> dict[str, list[Shape]]:
    found: dict[str, list[Shape]] = {}
    for line in text.splitlines():
        partition, nodes, cpus, memory, gres = line.split("|", 4)
        found.setdefault(partition, []).append(
            Shape(
                nodes=int(nodes), cpus=int(cpus.rstrip("+")), memory_mb=megabytes(memory),
                gres=read_gres(gres),
            )
        )  # fmt: skip
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Each:
    """A job's request for each of its nodes."""

    cpus: int = 1
    memory_mb: int = 0
    gres: Gres = field(default_factory=dict[tuple[str, str], int])


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A job's request, as far as limits apply to it.

    Attributes:
        partitions: () for the cluster's default.
        nodes, most_nodes: the minimum, and the wanted number.
        minutes: of wall time; None leaves it to the partition.
        exclude: nodes that it excludes, in SLURM's notation.
    """

    partitions: tuple[str, ...] = ()
    account: str | None = None
    qos: str | None = None
    nodes: int = 1
    most_nodes: int = 1
    each: Each = field(default_factory=Each)
    minutes: float | None = None
    exclude: str | None = None

    def total(self) -> dict[str, float]:
        """Return the job's totals, by SLURM's names of trackable resources."""
        return {
            "node": self.nodes,
            "cpu": self.nodes * self.each.cpus,
            "mem": self.nodes * self.each.memory_mb,
            **{f"gres/{name}": self.nodes * n for (name, _), n in self.each.gres.items()},
        }


def wanted(options: Mapping[str, object], *, nodes: tuple[int, int], cpus: int) -> Wanted:
    """Return the request that the #SBATCH options make.

    Args:
        nodes: the least and the most. cpus: of a node, for all of its ranks.
    """

    def text(name: str) -> str | None:
        return str(options[name]) if options.get(name) not in (None, True, False) else None

    gpus = text("gpus-per-node")
    listed = [f"gpu:{part}" for part in gpus.split(",")] if gpus else []
    return Wanted(
        partitions=tuple(name for name in (text("partition") or "").split(",") if name),
        account=text("account"),
        qos=text("qos"),
        nodes=nodes[0],
        most_nodes=nodes[1],
        each=Each(
            cpus=0 if "overcommit" in options else cpus,
            memory_mb=megabytes(text("mem") or "0"),
            gres=read_gres(",".join([*listed, *([text("gres") or ""] if text("gres") else [])])),
        ),
        minutes=minutes(text("time") or ""),
        exclude=text("exclude"),
    )


def misfit(job: Wanted, partition: Partition) -> str | None:
    """Return why a job can never run in a partition; None if it can."""
    name, allows = partition.name, partition.allows
    most = min(partition.nodes, allows.max_nodes or partition.nodes)
    if job.nodes > most:
        without = f" without the {partition.excluded} of cluster.exclude"
        return f"cluster.nodes={job.nodes}, but partition {name} gives {most} at most" + (
            without if partition.excluded else ""
        )
    if job.most_nodes < allows.min_nodes:
        return (
            f"cluster.nodes={job.most_nodes}, but partition {name} gives {allows.min_nodes} at "
            f"least"
        )
    if allows.max_cpus is not None and job.each.cpus > allows.max_cpus:
        return (
            f"cluster.ranks_per_node x cluster.cpus_per_rank is {job.each.cpus}, but partition "
            f"{name} gives {allows.max_cpus} CPUs of a node at most"
        )
    limit = allows.minutes
    if job.minutes is not None and limit is not None and job.minutes > limit:
        return (
            f"cluster.time_min={job.minutes:g}, but partition {name} allows {limit:g} minutes; try "
            f"cluster.time_min={limit:g} (a run that needs longer is requeued and goes on)"
        )
    if not partition.open:
        return f"partition {name} takes no jobs (it is inactive or being drained)"
    return _no_such_nodes(job, partition)


def _no_such_nodes(job: Wanted, partition: Partition) -> str | None:
    """Return why too few of a partition's nodes have the requested resources; None if enough do."""
    shapes = partition.shapes
    if not shapes or sum(s.nodes for s in shapes if _holds(s, job)) >= job.nodes:
        return None
    each = job.each
    wants = [("CPUs (cluster.ranks_per_node x cluster.cpus_per_rank)", each.cpus, lambda s: s.cpus),
             ("MB (cluster.memory_gib)", each.memory_mb, lambda s: s.memory_mb)]  # fmt: skip
    wants += [
        (f"{':'.join(filter(None, key))} (cluster.gpus_per_node, cluster.slurm_flags.gres)", count,
         lambda s, key=key: count_gres(s.gres, key))
        for key, count in job.each.gres.items()
    ]  # fmt: skip
    for what, asked, has in wants:
        if sum(shape.nodes for shape in shapes if has(shape) >= asked) < job.nodes:
            return (
                f"{asked} {what} of each of {job.nodes} nodes, but a node of partition "
                f"{partition.name} has {max(has(shape) for shape in shapes)} at most"
            )
    return f"partition {partition.name} has too few nodes with all that is asked of one"


def _holds(shape: Shape, job: Wanted) -> bool:
    return (
        shape.cpus >= job.each.cpus
        and shape.memory_mb >= job.each.memory_mb
        and all(count_gres(shape.gres, key) >= count for key, count in job.each.gres.items())
    )


def count_gres(gres: Gres, key: tuple[str, str]) -> int:
    """Return how many of a kind a node has; without a type, of any."""
    name, kind = key
    return sum(n for (other, type_), n in gres.items() if other == name and kind in ("", type_))


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """A limit in accounting. `whose`: its owner, for people."""

    whose: str
    resource: str
    most: float


def read_limits(whose: str, tres: Iterable[str], wall: str) -> Iterator[Limit]:
    """Parse accounting's limits. Args: tres: as in `node=2,gres/gpu=8`; wall: a time."""
    for text in tres:
        for pair in filter(None, text.split(",")):
            resource, _, most = pair.partition("=")
            size = float(most) if most.replace(".", "").isdigit() else float(megabytes(most))
            yield Limit(whose=whose, resource=resource, most=size)
    longest = minutes(wall)
    if longest is not None:
        yield Limit(whose=whose, resource="time", most=longest)


def exceeded(job: Wanted, limits: Iterable[Limit]) -> Iterator[str]:
    """Yield a sentence for each limit that the job can never keep."""
    asked = {**job.total(), "time": job.minutes or 0}
    for limit in limits:
        resource = "gres/gpu" if limit.resource.startswith("gres/gpu") else limit.resource
        if asked.get(resource, 0) > limit.most:
            unit = {"time": " minutes", "mem": " MB"}.get(resource, f" of {resource}")
            yield (
                f"the job asks for {asked[resource]:g}{unit}, but {limit.whose} allows "
                f"{limit.most:g}"
            )


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
DEFAULT_KILL_WAIT_S = 30.0
# sbatch's messages on missing things; waiting would not create them.
NEVER = (
    "invalid partition", "invalid account", "invalid qos", "invalid generic resource",
    "invalid feature", "invalid node name", "reservation is invalid",
)  # fmt: skip
ASSOCIATION = "format=Account,Partition,MaxTRES,GrpTRES,MaxWall,DefaultQOS"
QUALITY = "format=Name,MaxTRES,MaxTRESPU,GrpTRES,MaxWall,GraceTime,Preempt"
PREEMPT_TYPE = re.compile(r"^PreemptType\s*=\s*preempt/(\w+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The scheduler's answer to a request that it accepts.

    Attributes:
        words: its message.
        grace_s: the shortest expected notice of a stop.
        warnings: what may keep the job waiting, a sentence each.
        preempt_grace_s: GraceTime; None without preemption.
        kill_wait_s: KillWait, which follows it.
    """

    words: str
    grace_s: float
    warnings: tuple[str, ...] = ()
    preempt_grace_s: float | None = None
    kill_wait_s: float = DEFAULT_KILL_WAIT_S


def chosen_partitions(job: Wanted, known: Mapping[str, Partition]) -> list[Partition]:
    """Return the existing ones of the named partitions, or the default."""
    if not job.partitions:
        return [p for p in known.values() if p.is_default]
    return [known[name] for name in job.partitions if name in known]


def preempt_grace_s(
    partitions: list[Partition], shown: str = "", of_qos: float | None = None
) -> float | None:
    """Return seconds from a preemption's signal to SIGTERM; None without preemption.

    Args:
        shown: `scontrol show config`: whether the partition or the qos decides it.
        of_qos: as the job's qos has it.
    """
    kind = PREEMPT_TYPE.search(shown)
    if kind is not None and kind[1] in ("qos", "none"):
        return of_qos if kind[1] == "qos" else None
    return min((float(p.grace_s) for p in partitions if p.grace_s is not None), default=None)


def grace_s(config: Config, preempted: float | None, kill_wait_s: float = 0.0) -> float:
    """Return for how long the job lives after a stop signal at least, in seconds.

    A requeue by hand and a node set down give only `kill_wait_s`; they do not count here.
    """
    ahead = config.cluster.signal_ahead_s or SIGNAL_AHEAD_S
    return float(min(ahead, ahead if preempted is None else preempted + kill_wait_s))


def read_kill_wait_s(text: str) -> float:
    r"""Return KillWait of `scontrol show config`: seconds between SIGTERM and SIGKILL.

    >>> read_kill_wait_s("KillOnBadExit = 0\nKillWait                = 30 sec\n")
    30.0
    """
    found = KILL_WAIT.search(text)
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
    taken = {p.name: len(excluded & names(p.listed)) for p in known.values() if p.listed}
    return {
        p.name: replace(p, nodes=p.nodes - taken.get(p.name, 0), excluded=taken.get(p.name, 0))
        for p in known.values()
    }


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


class _Accounting:
    """sacctmgr's data, if there is accounting. Raises `SchedulerDown` if it does not answer."""

    def __init__(self, client: SlurmClient) -> None:
        self._client = client
        self.preempt_grace_s: float | None = None

    def _rows(self, *command: str) -> list[list[str]]:
        answer = self._client.ask("sacctmgr", "-nP", *command, timeout_s=ACCOUNTING_S)
        if answer.code and "connection" in answer.err.lower():
            raise SchedulerDown(answer.words)
        return [line.split("|") for line in answer.out.splitlines()] if not answer.code else []

    def against(self, job: Wanted, partitions: list[Partition]) -> Iterator[str]:
        """Yield missing names, and enforced limits that the job can never keep."""
        qualities = {row[0]: row for row in self._rows("show", "qos", QUALITY) if len(row) == 7}
        if not qualities:
            return  # no accounting
        own = [
            row
            for row in self._rows(
                "show", "assoc", "where", f"user={getpass.getuser()}", ASSOCIATION
            )
            if job.account in (None, row[0])
        ]
        self.preempt_grace_s = _grace_of_qos(job, own, qualities)
        if job.account is not None and not own:
            accounts = [row[0] for row in self._rows("list", "account", "format=Account") if row]
            if accounts and job.account.lower() not in accounts:
                yield (
                    f"cluster.account={job.account}: this cluster has no account '{job.account}'"
                    + did_you_mean(job.account, accounts)
                )
        if job.qos is not None and job.qos.lower() not in qualities:
            yield (
                f"cluster.qos={job.qos}: this cluster has no qos '{job.qos}'"
                + did_you_mean(job.qos, qualities)
            )
        over = list(_over_limits(job, own, qualities, partitions))
        if over and self._enforced():
            yield from over

    def _enforced(self) -> bool:
        shown = self._client.must("scontrol", "show", "config")
        line = next((x for x in shown.splitlines() if x.startswith("AccountingStorageEnforce")), "")
        return bool({"limits", "safe"} & set(line.partition("=")[2].strip().split(",")))


def _over_limits(
    job: Wanted,
    associations: list[list[str]],
    qualities: Mapping[str, list[str]],
    partitions: list[Partition],
) -> Iterator[str]:
    """Return why no association of the user, with its quality of service, admits the job."""
    of_partitions = {p.qos for p in partitions}
    against: list[list[str]] = []
    for account, partition, most, group, wall, default in associations:
        if partition and job.partitions and partition not in job.partitions:
            continue
        limits = list(read_limits(f"account {account}", (most, group), wall))
        shared = of_partitions if len(of_partitions) == 1 else set[str | None]()
        for name in {job.qos or default or None, *shared} - {None}:
            if (row := qualities.get(str(name))) is not None:
                limits += _limits_of(row)
        against.append(list(exceeded(job, limits)))
    if against and all(against):
        yield from against[0]


def _grace_of_qos(
    job: Wanted, associations: list[list[str]], qualities: Mapping[str, list[str]]
) -> float | None:
    """Return GraceTime of the job's qos, in seconds, if another may preempt it."""
    default = next((row[-1] for row in associations if row[-1]), "normal")
    name = (job.qos or default).lower()
    if not any(name in row[-1].lower().split(",") for row in qualities.values()):
        return None
    return seconds(qualities[name][-2]) if name in qualities else None


def _limits_of(quality: list[str]) -> Iterator[Limit]:
    name, *tres, wall, _, _ = quality
    return read_limits(f"qos {name}", tres, wall)


def check_request(client: SlurmClient, config: Config, job: Wanted, script: str) -> Verdict:
    """Refuse jobs that can never run. Raises `ClusterError`; `SchedulerDown` without an answer."""
    with ThreadPoolExecutor(max_workers=3) as beside:
        shown = beside.submit(client.must, "scontrol", "show", "config")
        tested = beside.submit(client.ask, "sbatch", "--test-only", text=script)
        shapes = beside.submit(client.ask, *SHAPES)
        known = read_partitions(client.must(*PARTITIONS), shapes.result().out)
        known = _without_excluded(client, job.exclude, known)
        answer = tested.result()
        job, words, warnings = read_test_only(answer, job, chosen_partitions(job, known), known)
        partitions = chosen_partitions(job, known)
        against = list(_against_partitions(job, known))
        accounting = _Accounting(client)
        try:
            against += accounting.against(job, partitions)
        except SchedulerDown as error:
            warnings.append(f"the limits of your account could not be looked at: {error}")
    if against or (answer.code and any(words in answer.words.lower() for words in NEVER)):
        said = explained(answer.words) if answer.code else TAKEN_ALL_THE_SAME
        raise ClusterError("\n".join([said, *against] if answer.code else [*against, said]))
    warnings += _possible_delays(answer, partitions)
    kill_wait_s = read_kill_wait_s(shown.result())
    preempted = preempt_grace_s(partitions, shown.result(), accounting.preempt_grace_s)
    return Verdict(
        words=words,
        grace_s=grace_s(config, preempted, kill_wait_s),
        warnings=tuple(warnings),
        preempt_grace_s=preempted,
        kill_wait_s=kill_wait_s,
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
