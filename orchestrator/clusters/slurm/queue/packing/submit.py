"""Runs of a sweep queued as few jobs, each of which as many of them share as there is room for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from orchestrator.clusters.api import Request
from orchestrator.clusters.slurm.admission.checks import check_request, chosen_partitions
from orchestrator.clusters.slurm.admission.limits import Wanted, wanted
from orchestrator.clusters.slurm.admission.partitions import PARTITIONS, SHAPES, read_partitions
from orchestrator.clusters.slurm.on_slurm import here
from orchestrator.clusters.slurm.queue.elements import ARRAYS, next_name
from orchestrator.clusters.slurm.queue.laid_out import Member, Placed, alike, lay_out, number_of
from orchestrator.clusters.slurm.queue.packing.script import pack_script
from orchestrator.clusters.slurm.queue.packing.shares import on_a_node, together
from orchestrator.clusters.slurm.queue.packing.threads import cpus_of_cores
from orchestrator.clusters.slurm.queue.sbatch import queue
from orchestrator.clusters.slurm.queue.scripts import patiently
from orchestrator.config.rules import packing
from orchestrator.config.schema import node_range
from orchestrator.errors import ClusterError, NotNow
from orchestrator.rundir.files import write_atomically
from orchestrator.rundir.folder import RunDir
from orchestrator.scheduler.client import SlurmClient
from orchestrator.units import plural


def submit_packed(placed: Sequence[Placed]) -> list[Placed]:
    """Submit those that are to share jobs; give the others, which are left to submit.

    Raises:
        ClusterError: so many cannot share a job, and nothing was queued; or the scheduler refuses
            one of them, and those before it are queued.
    """
    packs, left = packed(placed)
    if packs:
        packs[0][0][0].tell(told(packs, left))
    for part in packs:
        _queue(part)
    return left


def packed(placed: Sequence[Placed]) -> tuple[list[list[Placed]], list[Placed]]:
    """Those that are to share each job, and those that are left to submit otherwise; asks, and
    submits nothing. Raises `ClusterError` where so many cannot share a job.
    """
    left: list[Placed] = []
    packs: list[list[Placed]] = []
    for group in alike(placed):
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
    """How many of them share a job. Args: asked: 0 for as many as a node has room for."""
    cluster, _ = group[0]
    client = SlurmClient(cluster.config.cluster.slurm_conf)
    job = _wanted(group[:1])
    known = read_partitions(
        patiently(lambda: client.must(*PARTITIONS), tell=cluster.tell), client.must(*SHAPES)
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
    """What runs that are alike ask for together."""
    cluster, request = part[0]
    asked = cluster.config.cluster
    return wanted(
        together(request.details["options"], len(part)),
        nodes=node_range(asked.nodes),
        cpus=len(part) * asked.ranks_per_node * asked.cpus_per_rank,
    )


def _check(part: Sequence[Placed], asked: int) -> None:
    """Raise `ClusterError` where runs that share a job would never run."""
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
        patiently(ask, tell=cluster.tell)
    except NotNow:
        raise
    except ClusterError as error:
        how = "sweep.pack=true" if not asked else f"sweep.pack={asked}"
        raise ClusterError(
            f"{error}\n{how} has {plural(len(part), 'point')} share a job; let fewer share one "
            f"(sweep.pack=2), or leave it out"
        ) from error


def told(packs: Sequence[Sequence[Placed]], left: Sequence[Placed]) -> str:
    """How many share how many allocations, in words; there is one at least."""
    points, most, alone = sum(map(len, packs)), max(map(len, packs)), len(left)
    others = f"; {plural(alone, 'point')} by {'itself' if alone == 1 else 'themselves'}"
    return (
        f"{points} points share {plural(len(packs), 'allocation')}, {most} at once in "
        f"{'it' if len(packs) == 1 else 'each'}" + (others if alone else "")
    )


def _own_script(member: Member, asked: Request, copy: Path | None) -> str:
    return member.share_script(asked.run, asked.attempt, copy)


def _queue(part: Sequence[Placed]) -> None:
    """One job for all of them."""
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
