"""What a cluster can ever give: its partitions, their nodes, and the limits of accounts, as values.

Only what is configured counts here, not what is free, up or reserved at the moment: a job that has
to wait is a job, one that no configured node and no limit will ever admit is a mistake.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from orchestrator.scheduler.jobs import seconds

SHAPES = ("sinfo", "-a", "-h", "-e", "-o", "%R|%D|%c|%m|%G")
PARTITIONS = ("scontrol", "--all", "--oneliner", "show", "partition")
COUNT = re.compile(r"(\d+)([KMGT]?)")

Gres = dict[tuple[str, str], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Nodes of a partition that are alike: how many, and what one of them has."""

    nodes: int
    cpus: int
    memory_mb: int
    gres: Gres


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """What matters of one partition.

    Attributes:
        grace_s: between a preempting signal and the end.
        open: whether it takes jobs into its queue.
        up: whether it starts jobs at present.
        shapes: of its nodes; empty where they were not read.
        listed: its nodes in SLURM's notation.
        excluded: how many of them the job will not have; `nodes` is without these.
    """

    name: str
    nodes: int
    is_default: bool
    up: bool
    open: bool
    limit_min: float | None
    max_nodes: int | None
    min_nodes: int = 0
    max_cpus: int | None = None
    grace_s: int
    preemptible: bool
    qos: str | None = None
    shapes: tuple[Shape, ...] = ()
    listed: str = ""
    excluded: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a job asks for, as far as limits are about it.

    Attributes:
        partitions: () for the cluster's default.
        nodes, most_nodes: the least it can do with, and what it would like; the rest is what it
            wants of each of them.
        minutes: of wall time; None leaves it to the partition.
    """

    partitions: tuple[str, ...] = ()
    account: str | None = None
    qos: str | None = None
    nodes: int = 1
    most_nodes: int = 1
    cpus: int = 1
    memory_mb: int = 0
    gres: Gres = field(default_factory=dict[tuple[str, str], int])
    minutes: float | None = None

    def total(self) -> dict[str, float]:
        """All of the job's, by SLURM's names of trackable resources."""
        return {
            "node": self.nodes,
            "cpu": self.nodes * self.cpus,
            "mem": self.nodes * self.memory_mb,
            **{f"gres/{name}": self.nodes * count for (name, _), count in self.gres.items()},
        }


def wanted(options: Mapping[str, object], *, nodes: tuple[int, int], cpus: int) -> Wanted:
    """What the #SBATCH options ask for.

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
        cpus=0 if "overcommit" in options else cpus,
        memory_mb=megabytes(text("mem") or "0"),
        gres=read_gres(",".join([*listed, *([text("gres") or ""] if text("gres") else [])])),
        minutes=minutes(text("time") or ""),
    )


def megabytes(text: str) -> int:
    """SLURM's sizes, without a unit MB; 0 for what is none.

    >>> megabytes("16384"), megabytes("2G"), megabytes("")
    (16384, 2048, 0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", text.strip().rstrip("+").upper())
    factor = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}
    return int(float(found[1]) * factor[found[2]]) if found else 0


def minutes(text: str) -> float | None:
    """SLURM's time limits in minutes: `90`, `1:30:00`, `1-12`, `30:00`; None for no limit.

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
    """`gpu:a100:4(S:0-1),npu:8` as counts by (name, type); the type is "" where there is none.

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
    """`PARTITIONS`' answer, with `SHAPES`', as values."""
    alike = _read_shapes(shapes)
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        words: Mapping[str, str] = dict(w.split("=", 1) for w in line.split() if "=" in w)
        if "PartitionName" not in words:
            continue
        name, state = words["PartitionName"], words.get("State", "UP")
        qos = words.get("QoS", "N/A")
        found[name] = Partition(
            name=name,
            nodes=int(words.get("TotalNodes", "0")),
            is_default=words.get("Default") == "YES",
            up=state == "UP",
            open=state in ("UP", "DOWN"),
            limit_min=minutes(words.get("MaxTime", "")),
            max_nodes=_count_or_none(words.get("MaxNodes", "")),
            min_nodes=_count_or_none(words.get("MinNodes", "")) or 0,
            max_cpus=_count_or_none(words.get("MaxCPUsPerNode", "")),
            grace_s=int(words.get("GraceTime", "0")),
            # One that is suspended goes on later; it is not told to stop.
            preemptible=bool({"REQUEUE", "CANCEL"} & set(words.get("PreemptMode", "").split(","))),
            qos=None if qos in ("N/A", "") else qos,
            shapes=tuple(alike.get(name, ())),
            listed=words.get("Nodes", "").replace("(null)", ""),
        )
    return found


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


def misfit(job: Wanted, partition: Partition) -> str | None:
    """Why a job can never run in a partition; None when nothing stands against it."""
    name = partition.name
    most = min(partition.nodes, partition.max_nodes or partition.nodes)
    if job.nodes > most:
        without = f" without the {partition.excluded} of cluster.exclude"
        return f"cluster.nodes={job.nodes}, but partition {name} gives {most} at most" + (
            without if partition.excluded else ""
        )
    if job.most_nodes < partition.min_nodes:
        return (
            f"cluster.nodes={job.most_nodes}, but partition {name} gives {partition.min_nodes} at "
            f"least"
        )
    if partition.max_cpus is not None and job.cpus > partition.max_cpus:
        return (
            f"cluster.ranks_per_node x cluster.cpus_per_rank is {job.cpus}, but partition {name} "
            f"gives {partition.max_cpus} CPUs of a node at most"
        )
    limit = partition.limit_min
    if job.minutes is not None and limit is not None and job.minutes > limit:
        return (
            f"cluster.time_min={job.minutes:g}, but partition {name} allows {limit:g} minutes; try "
            f"cluster.time_min={limit:g} (a run that needs longer is requeued and goes on)"
        )
    if not partition.open:
        return f"partition {name} takes no jobs (it is inactive or being drained)"
    return _no_such_nodes(job, partition)


def _no_such_nodes(job: Wanted, partition: Partition) -> str | None:
    """Why too few of a partition's nodes have what is asked of each; None when enough do."""
    shapes = partition.shapes
    if not shapes or sum(s.nodes for s in shapes if _holds(s, job)) >= job.nodes:
        return None
    wants = [("CPUs (cluster.ranks_per_node x cluster.cpus_per_rank)", job.cpus, lambda s: s.cpus),
             ("MB (cluster.memory_gib)", job.memory_mb, lambda s: s.memory_mb)]  # fmt: skip
    wants += [
        (f"{':'.join(filter(None, key))} (cluster.gpus_per_node, cluster.slurm_flags.gres)", count,
         lambda s, key=key: _count(s.gres, key))
        for key, count in job.gres.items()
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
        shape.cpus >= job.cpus
        and shape.memory_mb >= job.memory_mb
        and all(_count(shape.gres, key) >= count for key, count in job.gres.items())
    )


def _count(gres: Gres, key: tuple[str, str]) -> int:
    """How many of a kind a node has; without a type, of any."""
    name, kind = key
    return sum(n for (other, type_), n in gres.items() if other == name and kind in ("", type_))


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """One bound that accounting knows. `whose`: as a person would name it."""

    whose: str
    resource: str
    most: float


def read_limits(whose: str, tres: Iterable[str], wall: str) -> Iterator[Limit]:
    """The limits in accounting's fields. Args: tres: as in `node=2,gres/gpu=8`; wall: a time."""
    for text in tres:
        for pair in filter(None, text.split(",")):
            resource, _, most = pair.partition("=")
            size = float(most) if most.replace(".", "").isdigit() else float(megabytes(most))
            yield Limit(whose=whose, resource=resource, most=size)
    longest = minutes(wall)
    if longest is not None:
        yield Limit(whose=whose, resource="time", most=longest)


def exceeded(job: Wanted, limits: Iterable[Limit]) -> Iterator[str]:
    """A sentence for each limit that the job can never keep."""
    asked = {**job.total(), "time": job.minutes or 0}
    for limit in limits:
        resource = "gres/gpu" if limit.resource.startswith("gres/gpu") else limit.resource
        if asked.get(resource, 0) > limit.most:
            unit = {"time": " minutes", "mem": " MB"}.get(resource, f" of {resource}")
            yield (
                f"the job asks for {asked[resource]:g}{unit}, but {limit.whose} allows "
                f"{limit.most:g}"
            )
