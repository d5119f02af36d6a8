"""Packing (`sweep.pack`): runs of a sweep that share an allocation.

Runs that share an allocation request the same, and each has ranks on all of its nodes. The
allocation has one run's number of nodes, and a multiple of one run's tasks, memory and GPUs.
Only options for a node's resources are multiplied; options without a known share are refused.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from orchestrator.clusters.api import Request, State
from orchestrator.clusters.slurm.admission import (
    PARTITIONS,
    SHAPES,
    Partition,
    Shape,
    Wanted,
    check_request,
    chosen_partitions,
    count_gres,
    read_partitions,
    wanted,
)
from orchestrator.clusters.slurm.batch_script import pack_script
from orchestrator.clusters.slurm.submission import (
    ARRAYS,
    NUMBER,
    Member,
    Placed,
    group_equal,
    here,
    lay_out,
    next_name,
    number_of,
    queue,
    retry_unanswered,
)
from orchestrator.config.rules import packing
from orchestrator.config.schema import Config, node_range
from orchestrator.errors import ClusterError, ConfigError, NotNow
from orchestrator.rundir.files import write_atomically
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import write_end
from orchestrator.slurm_client import SlurmClient, queued
from orchestrator.units import plural

STEPS = ("squeue", "-h", "-s", "-o", "%i|%j")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """A shared job: the script that it was queued by, and the runs it began with."""

    job_id: str
    script: Path
    runs: tuple[RunDir, ...]

    def left(self) -> list[RunDir]:
        """Return the runs that are not over, and have not been submitted anew."""
        found: list[RunDir] = []
        for run in self.runs:
            handle = run.read_handle() if run.path.is_dir() else None
            here = handle is not None and handle["job_id"] == self.job_id
            found += [run] if here and run.read_result() is None else []
        return found


def pack_of(run: RunDir) -> Pack | None:
    """Return the job that a run shares with others; None if it has its own."""
    handle = run.read_handle() or {}
    if not (pack := handle.get("pack")):
        return None
    sweep = run.path.parent
    names = [str(name) for name in pack["runs"] if NUMBER.fullmatch(str(name))]
    return Pack(
        job_id=str(handle["job_id"]),
        script=sweep / ARRAYS / Path(pack["script"]).name,
        runs=tuple(RunDir(sweep / name) for name in names),
    )


def is_packed_in(run: RunDir, script: Path, job_id: str) -> bool:
    """Return whether a job is shared by this run.

    Args:
        script: the job's script as the scheduler knows it, without links.
    """
    pack = pack_of(run)
    if pack is None or pack.job_id != job_id:
        return False
    return script == Path(os.path.realpath(pack.script))


def is_over(run: RunDir) -> bool:
    """Return whether a run in a shared job has ended, whatever the others do."""
    return pack_of(run) is not None and run.read_result() is not None


def title_of(run: RunDir, job_id: str) -> str:
    """Return its name for people."""
    shared = f"point {run.path.name}, in job {job_id}," if pack_of(run) else ""
    return shared or f"job {job_id}"


def waits_for_others(run: RunDir) -> bool:
    """Return whether its ranks have ended, and it restarts together with the other runs."""
    left = run.departure(max(0, run.attempts_made() - 1)).exists()
    return left and run.read_result() is None and bool(others_left(run))


def others_left(run: RunDir) -> list[RunDir]:
    """Return the other runs of a run's job that are not over."""
    pack = pack_of(run)
    return [other for other in pack.left() if other.path != run.path] if pack else []


def steps(client: SlurmClient, job_ids: Iterable[str]) -> dict[tuple[str, str], str]:
    """Return the steps of running jobs, by (job, the step's name). Raises `SchedulerDown`."""
    answer = client.must(*STEPS, "-j", ",".join(job_ids))
    found: dict[tuple[str, str], str] = {}
    for line in answer.splitlines():
        step, _, name = line.partition("|")
        found[step.partition(".")[0], name] = step
    return found


# These hold for an allocation as they do for one run of it.
SAME_FOR_ALL = frozenset({
    "job-name", "partition", "account", "qos", "reservation", "constraint", "exclude", "nodes",
    "cpus-per-task", "time", "exclusive", "requeue", "no-requeue", "signal", "comment", "output",
    "open-mode", "wckey", "acctg-freq", "begin", "contiguous", "cpu-freq", "deadline",
    "delay-boot", "dependency", "hold", "mail-type", "mail-user", "mcs-label", "network", "nice",
    "power", "prefer", "priority", "profile", "switches", "thread-spec", "core-spec",
})  # fmt: skip
TIMES = frozenset({"ntasks-per-node", "mem", "gpus-per-node"})
# For srun these select a step's part of the allocation, which we set here.
OF_A_STEP = (
    "cores-per-socket", "cpus-per-gpu", "exact", "exclusive", "gpus", "gpus-per-node",
    "gpus-per-socket", "gpus-per-task", "gres", "job-name", "mem", "mem-per-cpu", "mem-per-gpu",
    "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket", "overcommit", "overlap", "resv-ports",
    "sockets-per-node", "threads-per-core", "whole",
)  # fmt: skip


def refuse_uncounted(config: Config, options: Mapping[str, object]) -> None:
    """Raise `ConfigError` if runs are to share allocations and a share is not known.

    Args:
        options: of sbatch, as one run would have them.
    """
    if packing(config.sweep.pack) is None:
        return
    wrong = [
        f"sweep.pack={_value(config)} cannot be with sbatch's --{name}: it says what a job of one "
        f"point takes, and what a point's share of it would be is not known; leave one of them out"
        for name in options
        if name not in SAME_FOR_ALL | TIMES
    ]
    wrong += [
        f"sweep.pack={_value(config)} cannot be with cluster.srun_flags.{name}: which part of the "
        f"allocation a point takes is said by the sweep; leave one of them out"
        for name in config.cluster.srun_flags
        if any(option.startswith(str(name)) for option in OF_A_STEP)
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))


def _value(config: Config) -> str:
    return str(config.sweep.pack).lower()


def together(options: Mapping[str, object], count: int) -> dict[str, object]:
    """Return the options for `count` equal runs together.

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
    """Return srun's options of a named step with its own part of the allocation."""
    yield "--exact"
    yield f"--job-name={name}"


def all_memory(config: Config) -> Iterator[str]:
    """Let each run use all of the job's memory if no request says how much a run needs.

    Otherwise a step would take all of it, and the next one would wait.
    """
    if config.cluster.memory_gib is None:
        yield "--mem=0"


def on_a_node(job: Wanted, partitions: Sequence[Partition]) -> tuple[int, int]:
    """Return how many runs fit on one node: on the smallest with room for any, and on the largest.

    (0, 0) if no known node has room.

    >>> from orchestrator.clusters.slurm.admission import Each
    >>> from orchestrator.clusters.slurm.admission import Allowed
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
    counts += [count_gres(shape.gres, key) // wished for key, wished in each.gres.items()]
    return min(counts)


THREADS = ("sinfo", "-a", "-h", "-e", "-o", "%R|%Z")
BY_CPU = re.compile(r"^SelectTypeParameters\s*=.*\bCR_CPU", re.MULTILINE)


def cpus_of_cores(client: SlurmClient, cpus: int, partitions: Collection[str]) -> None:
    """Raise `ClusterError` if a run's share of a node is not a number of whole cores."""
    lines = [line.partition("|") for line in client.must(*THREADS).splitlines()]
    threads = max(
        (int(count) for name, _, count in lines if name in partitions and count.isdigit()),
        default=1,
    )
    if cpus % threads == 0 or BY_CPU.search(client.must("scontrol", "show", "config")):
        return
    raise ClusterError(
        f"sweep.pack: a point takes {cpus} CPUs of a node, but a core is {threads} CPUs here, and "
        f"two points cannot share one; with cluster.cpus_per_rank={threads} each has its own"
    )


def submit_packed(placed: Sequence[Placed]) -> list[Placed]:
    """Submit the runs that share jobs; return the others, which are left to submit.

    Raises:
        ClusterError: so many cannot share a job, and nothing was queued; or the scheduler refuses
            one of them, and those before it are queued.
    """
    packs, left = packed(placed)
    if packs:
        packs[0][0][0].tell(describe_packs(packs, left))
    for part in packs:
        _queue(part)
    return left


def packed(placed: Sequence[Placed]) -> tuple[list[list[Placed]], list[Placed]]:
    """Return the runs of each shared job, and those to submit otherwise.

    Queries, and submits nothing. Raises `ClusterError` if so many cannot share a job.
    """
    left: list[Placed] = []
    packs: list[list[Placed]] = []
    for group in group_equal(placed):
        asked = packing(group[0][0].config.sweep.pack)
        if asked is None or len(group) < 2 or number_of(group[0]) is None:
            left += group
            continue
        count = min(_count(group, asked), len(group))
        parts = [group[n : n + count] for n in range(0, len(group), count)]
        for size in sorted({len(part) for part in parts if len(part) > 1}):
            _check(group[:size], asked)
        packs += [part for part in parts if len(part) > 1]
        left += [member for part in parts if len(part) == 1 for member in part]
    return packs, left


def _count(group: Sequence[Placed], asked: int) -> int:
    """Return how many of them share a job. Args: asked: 0 for as many as a node has room for."""
    cluster, _ = group[0]
    client = SlurmClient(cluster.config.cluster.slurm_conf)
    job = _wanted(group[:1])
    known = read_partitions(
        retry_unanswered(lambda: client.must(*PARTITIONS), tell=cluster.tell), client.must(*SHAPES)
    )
    partitions = chosen_partitions(job, known)
    cpus_of_cores(client, job.each.cpus, [partition.name for partition in partitions])
    least, most = on_a_node(job, partitions)
    if not most:
        raise ClusterError(
            "sweep.pack: what the partition's nodes have cannot be read from sinfo, so that nobody "
            "knows how many points one has room for; leave sweep.pack out"
        )
    if asked > most:
        raise ClusterError(
            f"sweep.pack={asked}, but a node of the partition has room for "
            f"{plural(most, 'point')} at most, at {plural(job.each.cpus, 'CPU')} each"
            + (f" and {job.each.memory_mb} MB" if job.each.memory_mb else "")
            + (f"; try sweep.pack={most}" if most > 1 else "; leave sweep.pack out")
        )
    return asked or least


def _wanted(part: Sequence[Placed]) -> Wanted:
    """Return the request of equal runs together."""
    cluster, request = part[0]
    asked = cluster.config.cluster
    return wanted(
        together(request.details["options"], len(part)),
        nodes=node_range(asked.nodes),
        cpus=len(part) * asked.ranks_per_node * asked.cpus_per_rank,
    )


def _check(part: Sequence[Placed], asked: int) -> None:
    """Raise `ClusterError` if runs that share a job would never run."""
    cluster, request = part[0]
    client, job = SlurmClient(cluster.config.cluster.slurm_conf), _wanted(part)
    text = pack_script(
        [member.run for _, member in part],
        request.attempt,
        together(request.details["options"], len(part)),
        here(cluster.config, request.run / "code"),
    )
    ask = partial(check_request, client, cluster.config, job, text)
    try:
        retry_unanswered(ask, tell=cluster.tell)
    except NotNow:
        raise
    except ClusterError as error:
        how = "sweep.pack=true" if not asked else f"sweep.pack={asked}"
        raise ClusterError(
            f"{error}\n{how} has {plural(len(part), 'point')} share a job; let fewer share one "
            f"(sweep.pack=2), or leave it out"
        ) from error


def describe_packs(packs: Sequence[Sequence[Placed]], left: Sequence[Placed]) -> str:
    """Describe how many runs share how many allocations, of which there is at least one."""
    points, most, alone = sum(map(len, packs)), max(map(len, packs)), len(left)
    others = f"; {plural(alone, 'point')} by {'itself' if alone == 1 else 'themselves'}"
    return (
        f"{points} points share {plural(len(packs), 'allocation')}, {most} at once in "
        f"{'it' if len(packs) == 1 else 'each'}" + (others if alone else "")
    )


def _own_script(member: Member, asked: Request, copy: Path | None) -> str:
    return member.share_script(asked.run, asked.attempt, copy)


def _queue(part: Sequence[Placed]) -> None:
    """Queue one job for all of them."""
    cluster, request = part[0]
    sweep = request.run.parent
    copy = lay_out(sweep, part, _own_script)
    script = next_name(sweep / ARRAYS).with_suffix(".sh")
    stated = together(request.details["options"], len(part))
    names = {str(asked.details["options"]["job-name"]) for _, asked in part}
    stated["job-name"] = names.pop() if len(names) == 1 else sweep.name
    stated["output"] = str(script.with_suffix(".log"))
    text = pack_script(
        [asked.run for _, asked in part],
        request.attempt,
        stated,
        here(cluster.config, copy or request.run / "code"),
    )
    write_atomically(script, text)
    queue(
        RunDir(sweep),
        script,
        request.attempt,
        cluster.config.cluster.slurm_conf,
        {asked.run.name: "" for _, asked in part},
        pack=True,
        tell=cluster.tell,
    )


BEGIN_S, LOOK_S = 5.0, 0.2


def of_whole_jobs(runs: Mapping[RunDir, str]) -> set[str]:
    """Return the jobs without other live runs, which may be signalled as a whole.

    Args:
        runs: those to end, with their jobs.
    """
    ending = {run.path for run in runs}
    shared: set[str] = set()
    for run, job_id in runs.items():
        pack = pack_of(run)
        left = pack.left() if pack else []
        shared |= {job_id} if any(other.path not in ending for other in left) else set()
    return set(runs.values()) - shared


def end_parts(client: SlurmClient, runs: Mapping[RunDir, str], *flags: str) -> None:
    """Signal the steps of runs whose jobs continue for others. The runs are marked as cancelled.

    So a run that has not begun ends by itself at its start, and here if its job waits.

    Args:
        flags: of scancel.

    Raises:
        ClusterError: the scheduler does not answer, or a run has not reached its step in time.
    """
    left = dict(runs)
    deadline = time.monotonic() + BEGIN_S
    while left:
        jobs = queued(client, sorted(set(left.values())))
        known = steps(client, sorted(set(left.values())))
        there = {run: known[key] for run, j in left.items() if (key := (j, run.path.name)) in known}
        if there:
            answer = client.ask("scancel", *flags, *there.values())
            if answer.code and "already complet" not in answer.words.lower():
                raise ClusterError(f"scancel: {answer.words}")
        left = {run: job for run, job in left.items() if run not in there}
        for run, job_id in list(left.items()):
            job = jobs.get(job_id)
            if job is None or job.waiting or not job.alive or waits_for_others(run):
                write_end(run, State.STOPPED)
            if run.result.exists():
                del left[run]
        if left and time.monotonic() > deadline:
            names = ", ".join(run.path.name for run in left)
            raise ClusterError(f"point {names} is about to begin; cancel it again in a moment")
        if left:
            time.sleep(LOOK_S)
