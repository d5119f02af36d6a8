"""A cluster's partitions and their nodes as it has them configured, read into values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

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
class Allowed:
    """What a partition allows one job: minutes of wall time, nodes, and CPUs of each of them."""

    minutes: float | None
    max_nodes: int | None
    min_nodes: int
    max_cpus: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """What matters of one partition.

    Attributes:
        state: in SLURM's words.
        grace_s: between a preempting signal and the end; None where nobody is preempted.
        shapes: of its nodes; empty where they were not read.
        listed: its nodes in SLURM's notation.
        excluded: how many of them the job will not have; `nodes` is without these.
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
        """Whether it starts jobs at present."""
        return self.state == "UP"

    @property
    def open(self) -> bool:
        """Whether it takes jobs into its queue."""
        return self.state in ("UP", "DOWN")


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
        partition = _read_partition(words)
        found[partition.name] = replace(partition, shapes=tuple(alike.get(partition.name, ())))
    return found


def _read_partition(words: Mapping[str, str]) -> Partition:
    qos = words.get("QoS", "N/A")
    # One that is suspended goes on later; it is not told to stop.
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
