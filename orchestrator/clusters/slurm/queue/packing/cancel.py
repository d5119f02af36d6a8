"""Some of the runs ended that share a job: their steps alone hear of it."""

from __future__ import annotations

import time
from collections.abc import Mapping

from orchestrator.clusters.api import State
from orchestrator.clusters.slurm.queue.packing.members import pack_of, steps, waits_for_others
from orchestrator.errors import ClusterError
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import write_end
from orchestrator.scheduler.client import SlurmClient
from orchestrator.scheduler.jobs import queued

BEGIN_S, LOOK_S = 5.0, 0.2


def of_whole_jobs(runs: Mapping[RunDir, str]) -> set[str]:
    """The jobs of which no other run is left, and that may be signalled as wholes.

    Args:
        runs: those that are to end, with their jobs.
    """
    ending = {run.path for run in runs}
    shared: set[str] = set()
    for run, job_id in runs.items():
        pack = pack_of(run)
        left = pack.left() if pack else []
        shared |= {job_id} if any(other.path not in ending for other in left) else set()
    return set(runs.values()) - shared


def end_parts(client: SlurmClient, runs: Mapping[RunDir, str], *flags: str) -> None:
    """Signal the steps of runs whose jobs go on for others. They are marked as cancelled by now: so
    what has not begun yet ends by itself when it would, and here where its job waits.

    Args:
        flags: of scancel.

    Raises:
        ClusterError: the scheduler is silent, or a run has not come to its step in time.
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
