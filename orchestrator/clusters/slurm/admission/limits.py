"""What a job asks of a cluster, and whether any partition and account can ever give it.

Only what is configured counts here, not what is free, up or reserved at the moment: a job that has
to wait is a job, one that no configured node and no limit will ever admit is a mistake.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from orchestrator.clusters.slurm.admission.partitions import (
    Gres,
    Partition,
    Shape,
    megabytes,
    minutes,
    read_gres,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Each:
    """What a job wants of each of its nodes."""

    cpus: int = 1
    memory_mb: int = 0
    gres: Gres = field(default_factory=dict[tuple[str, str], int])


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a job asks for, as far as limits are about it.

    Attributes:
        partitions: () for the cluster's default.
        nodes, most_nodes: the least it can do with, and what it would like.
        minutes: of wall time; None leaves it to the partition.
        exclude: nodes that it will not have, in SLURM's notation.
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
        """All of the job's, by SLURM's names of trackable resources."""
        return {
            "node": self.nodes,
            "cpu": self.nodes * self.each.cpus,
            "mem": self.nodes * self.each.memory_mb,
            **{f"gres/{name}": self.nodes * n for (name, _), n in self.each.gres.items()},
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
        each=Each(
            cpus=0 if "overcommit" in options else cpus,
            memory_mb=megabytes(text("mem") or "0"),
            gres=read_gres(",".join([*listed, *([text("gres") or ""] if text("gres") else [])])),
        ),
        minutes=minutes(text("time") or ""),
        exclude=text("exclude"),
    )


def misfit(job: Wanted, partition: Partition) -> str | None:
    """Why a job can never run in a partition; None when nothing stands against it."""
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
    """Why too few of a partition's nodes have what is asked of each; None when enough do."""
    shapes = partition.shapes
    if not shapes or sum(s.nodes for s in shapes if _holds(s, job)) >= job.nodes:
        return None
    each = job.each
    wants = [("CPUs (cluster.ranks_per_node x cluster.cpus_per_rank)", each.cpus, lambda s: s.cpus),
             ("MB (cluster.memory_gib)", each.memory_mb, lambda s: s.memory_mb)]  # fmt: skip
    wants += [
        (f"{':'.join(filter(None, key))} (cluster.gpus_per_node, cluster.slurm_flags.gres)", count,
         lambda s, key=key: _count(s.gres, key))
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
        and all(_count(shape.gres, key) >= count for key, count in job.each.gres.items())
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
