"""What the batch script of an ended job could not do any more, done by whoever looks at it next.

A script that is killed (kill -9, a node that goes down with it) leaves a run that stands still: no
result, and not in the queue. `status` finishes its work, under the run's lock, and only with the
scheduler's own word that the job has ended; `resume` submits it again anyway.
"""

from __future__ import annotations

import os
import time
from typing import Any

from orchestrator.clusters.api import State
from orchestrator.clusters.slurm.ending.after_srun import cancelled_by_scheduler, conclude
from orchestrator.clusters.slurm.trust import client_of
from orchestrator.clusters.slurm.watch import ending, read_handle
from orchestrator.errors import RunFolderError
from orchestrator.lifecycle.stopping.departure import ask_for_requeue
from orchestrator.rundir.checkpoints import read_newest
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.lock import held
from orchestrator.rundir.outcome import write_end
from orchestrator.scheduler.jobs import ALIVE, Job, Standing, queued, standing


def settle_ended(run: RunDir, job: Job) -> str | None:
    """Hand an ended job back to the queue if its ranks left in order, else write the run's end.

    Args:
        job: what was just heard of it; it is asked for once more.

    Returns:
        A sentence when it was handed back. Nothing is done while the job lives, while another holds
        the run, when its end is written, or where it is not ours to write. Raises `ClusterError`.
    """
    if not os.access(run.path, os.W_OK | os.X_OK):
        return None
    try:
        with held(run):
            return _settle(run, job)
    except RunFolderError:  # its holder sees to it
        return None


def dismiss_held(run: RunDir, job: Job) -> str | None:
    """Take a job out of the queue that was requeued after its run's end, and that SLURM holds: a
    node could not start it, and it would stay there for good.

    Returns:
        A sentence when that was done. Raises `ClusterError`.
    """
    if not os.access(run.path, os.W_OK | os.X_OK):
        return None
    try:
        with held(run):
            handle = read_handle(run)
            client = client_of(run, handle.get("slurm_conf"))
            now = queued(client, [job.id]).get(job.id) if str(handle["job_id"]) == job.id else None
            if now is None or not now.held or run.read_result() is None:
                return None
            client.must("scancel", job.id)
    except RunFolderError:  # its holder sees to it
        return None
    return (
        f"{run.path}: job {job.id} was queued once more after the run's end, and held there "
        f"({now.reason}); it is taken out of the queue"
    )


def _settle(run: RunDir, seen: Job) -> str | None:
    handle = read_handle(run)
    client = client_of(run, handle.get("slurm_conf"))
    job = standing(client, seen.id) if str(handle["job_id"]) == seen.id else None
    list(run.path.iterdir())  # a file system of a network then looks for a result once more
    if job is None or job.state in ALIVE or run.read_result() is not None:
        return None
    attempt = int(handle["attempt"]) + job.restarts
    if read_newest(run.newest_attempt) > attempt:
        return None
    if job.state == "CANCELLED":
        write_end(run, State.STOPPED, cancelled_by_scheduler())
        return None
    known = Job(
        id=seen.id, state=job.state, nodes=seen.nodes,
        exit_code=job.exit_code, exit_signal=job.exit_signal,
    )  # fmt: skip
    again = conclude(
        run,
        attempt,
        job.exit_code or (128 + job.exit_signal if job.exit_signal else 0),
        job,
        departure=run.read(run.departure(attempt)) or _of_killed_script(run, attempt, job),
        culprit=lambda: ending(run, known, attempt)[1],
        again=lambda: ask_for_requeue(client, seen.id),
    )
    return (
        f"{run.path}: the batch script of job {seen.id} was gone before it could hand the job back "
        f"to the queue; that is done now"
        if again
        else None
    )


def _of_killed_script(run: RunDir, attempt: int, job: Standing) -> dict[str, Any] | None:
    """The departure where nothing but the batch script failed, by a signal: SLURM then ends the
    ranks, and they may have had no time.
    """
    if not job.exit_signal or job.state != "FAILED" or run.failures(attempt):
        return None
    return {"why": "its batch script was killed", "updates": None, "time": time.time()}
