"""What runs ask for together, and how many of them a node has room for: arithmetic on options.

Runs that share an allocation are alike, and each has its ranks on all of its nodes: the allocation
has as many nodes as one of them asks for, and on each of these so many times a run's tasks, memory
and GPUs. So only what says how much of a node is taken is multiplied, and an option of which nobody
here knows what a share of it would be is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from orchestrator.clusters.slurm.admission.limits import Wanted
from orchestrator.clusters.slurm.admission.partitions import Partition, Shape
from orchestrator.config.rules import packing
from orchestrator.config.schema import Config
from orchestrator.errors import ConfigError

# What these say holds for an allocation as it does for one run of it.
SAME_FOR_ALL = frozenset({
    "job-name", "partition", "account", "qos", "reservation", "constraint", "exclude", "nodes",
    "cpus-per-task", "time", "exclusive", "requeue", "no-requeue", "signal", "comment", "output",
    "open-mode", "wckey", "acctg-freq", "begin", "contiguous", "cpu-freq", "deadline",
    "delay-boot", "dependency", "hold", "mail-type", "mail-user", "mcs-label", "network", "nice",
    "power", "prefer", "priority", "profile", "switches", "thread-spec", "core-spec",
})  # fmt: skip
TIMES = frozenset({"ntasks-per-node", "mem", "gpus-per-node"})
# Of srun these say which part of the allocation a step takes, and that is ours to say here.
OF_A_STEP = (
    "cores-per-socket", "cpus-per-gpu", "exact", "exclusive", "gpus", "gpus-per-node",
    "gpus-per-socket", "gpus-per-task", "gres", "job-name", "mem", "mem-per-cpu", "mem-per-gpu",
    "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket", "overcommit", "overlap", "resv-ports",
    "sockets-per-node", "threads-per-core", "whole",
)  # fmt: skip


def refuse_uncounted(config: Config, options: Mapping[str, object]) -> None:
    """Raise `ConfigError` where runs are to share allocations, and nobody knows what a share is.

    Args:
        options: of sbatch, as one run would have them.
    """
    if packing(config.sweep.pack) is None:
        return
    wrong = [
        f"sweep.pack={_told(config)} cannot be with sbatch's --{name}: it says what a job of one "
        f"point takes, and what a point's share of it would be is not known; leave one of them out"
        for name in options
        if name not in SAME_FOR_ALL | TIMES
    ]
    wrong += [
        f"sweep.pack={_told(config)} cannot be with cluster.srun_flags.{name}: which part of the "
        f"allocation a point takes is said by the sweep; leave one of them out"
        for name in config.cluster.srun_flags
        if any(option.startswith(str(name)) for option in OF_A_STEP)
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))


def _told(config: Config) -> str:
    return str(config.sweep.pack).lower()


def together(options: Mapping[str, object], count: int) -> dict[str, object]:
    """What so many runs ask for that are alike.

    >>> together({"nodes": "2", "ntasks-per-node": "3", "gpus-per-node": "a:1,b:2"}, 4)
    {'nodes': '2', 'ntasks-per-node': '12', 'gpus-per-node': 'a:4,b:8'}
    """
    return {k: _times(str(v), count) if k in TIMES else v for k, v in options.items()}


def _times(amount: str, count: int) -> str:
    parts: list[str] = []
    for part in amount.split(","):
        kind, colon, number = part.rpartition(":")
        digits = number.rstrip("KMGT")
        parts.append(f"{kind}{colon}{int(digits) * count}{number[len(digits) :]}")
    return ",".join(parts)


def step_of(name: str) -> Iterator[str]:
    """Srun's options of a step that has its own part of the allocation, and is known by a name."""
    yield "--exact"
    yield f"--job-name={name}"


def all_memory(config: Config) -> Iterator[str]:
    """Where nobody says how much memory a run takes, all of them may use what the job has: a step
    would take the whole of it otherwise, and the next one wait for that.
    """
    if config.cluster.memory_gib is None:
        yield "--mem=0"


def on_a_node(job: Wanted, partitions: Sequence[Partition]) -> tuple[int, int]:
    """How many runs have room on one node: on the smallest, of those that have room for any, and
    on the largest. (0, 0): no node is known that has.

    >>> from orchestrator.clusters.slurm.admission.limits import Each
    >>> from orchestrator.clusters.slurm.admission.partitions import Allowed
    >>> small, large = (Shape(nodes=4, cpus=n, memory_mb=64, gres={}) for n in (8, 32))
    >>> allows = Allowed(minutes=None, max_nodes=None, min_nodes=0, max_cpus=None)
    >>> one = Partition(name="p", nodes=8, is_default=True, state="UP", allows=allows, grace_s=None,
    ...                 shapes=(small, large))
    >>> on_a_node(Wanted(each=Each(cpus=2)), [one])
    (4, 16)
    >>> on_a_node(Wanted(each=Each(cpus=2, memory_mb=10)), [one])
    (4, 6)
    """
    counts = [_room(job, p, shape) for p in partitions for shape in p.shapes]
    counts = [count for count in counts if count]
    return min(counts, default=0), max(counts, default=0)


def _room(job: Wanted, partition: Partition, shape: Shape) -> int:
    each, most = job.each, partition.allows.max_cpus
    counts = [shape.cpus // each.cpus]
    if most is not None:
        counts.append(most // each.cpus)
    if each.memory_mb:
        counts.append(shape.memory_mb // each.memory_mb)
    for (name, kind), wanted in each.gres.items():
        there = sum(
            n for (other, of), n in shape.gres.items() if other == name and kind in ("", of)
        )
        counts.append(there // wanted)
    return min(counts)
