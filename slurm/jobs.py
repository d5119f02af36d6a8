"""Processes of jobs on the nodes: step daemons, and their tasks.

They outlive their slurmd (that is how SLURM is made), so their pids are in none of our files.
A step daemon is known by the folder it runs in, which is its node's spool folder; a task, by the
environment that the step daemon gave it, which no process outside a job has.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from slurm import processes
from slurm.layout import Layout
from slurm.polling import wait_until

_KILL_SECONDS = 30
_RANK = re.compile(r"rank (\d+)")
_STEP_TITLE = re.compile(r"slurmstepd: \[(\d+)\.(\w+)\]")


@dataclass(frozen=True, kw_only=True)
class StepDaemon:
    """A slurmstepd; `step` is a number, "batch", "interactive" or "extern"."""

    pid: int
    node: str
    job: int
    step: str


@dataclass(frozen=True, kw_only=True)
class Task:
    """A process of a job; `step` and `rank` are None in the batch script and its children."""

    pid: int
    node: str
    job: int
    step: str | None
    rank: int | None


@dataclass(frozen=True, kw_only=True)
class NodeProcesses:
    """Processes on one node; a rank may have several (a shell and its children)."""

    slurmd: int | None
    step_daemons: tuple[StepDaemon, ...]
    tasks: tuple[Task, ...]


def job_processes(at: Layout) -> Iterator[StepDaemon | Task]:
    """Return everything that jobs of this cluster have running now, on all nodes."""
    for process in psutil.process_iter():
        try:
            found = _step_daemon(process, at) or _task(process, at)
        except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            # It ended while we looked, is ending, or is another person's.
            continue
        if found is not None:
            yield found


def kill_jobs(at: Layout, node: str | None = None) -> tuple[StepDaemon | Task, ...]:
    """Kill all job processes of a node, or of all nodes, and return them.

    Looks again until there are none: a process may have been starting while we looked.
    """
    killed: dict[int, StepDaemon | Task] = {}

    def none_left() -> bool:
        found = [p for p in job_processes(at) if node in (None, p.node)]
        # Step daemons first: one that lives reports the end of its tasks. Pids do not tell, since
        # they begin anew at some number.
        found.sort(key=lambda p: isinstance(p, Task))
        killed.update({p.pid: p for p in found})
        processes.kill(p.pid for p in found)
        return not found

    wait_until(none_left, seconds=_KILL_SECONDS, what="no process of a job was left")
    return tuple(killed.values())


def _step_daemon(process: psutil.Process, at: Layout) -> StepDaemon | None:
    title = _STEP_TITLE.match(" ".join(process.cmdline()))
    if title is None:
        return None
    folder = Path(process.cwd())
    if folder.parent != Path(os.path.realpath(at.spools)):
        return None
    job, step = title.groups()
    return StepDaemon(pid=process.pid, node=folder.name, job=int(job), step=step)


def _task(process: psutil.Process, at: Layout) -> Task | None:
    environment = process.environ()
    node, job = environment.get("SLURMD_NODENAME"), environment.get("SLURM_JOB_ID")
    if node is None or job is None or environment.get("SLURM_CONF") != str(at.slurm_conf):
        return None
    rank = _RANK.fullmatch(process.name())  # the agent of a node names its workers
    step = environment.get("SLURM_STEP_ID")
    return Task(
        pid=process.pid,
        node=node,
        job=int(job),
        step=step,
        rank=None if rank is None else int(rank[1]),
    )
