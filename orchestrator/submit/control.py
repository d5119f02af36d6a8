"""Stopping a run and reading its logs from another shell, wherever it runs."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from orchestrator.errors import ClusterError, RunFolderError
from orchestrator.rundir import RunDir
from orchestrator.submit.api import State
from orchestrator.submit.ending import write_end
from orchestrator.submit.folder_status import RunStatus, is_held
from orchestrator.submit.slurm_jobs import queued
from orchestrator.submit.slurm_watch import SlurmHandle
from orchestrator.submit.status import statuses

FOLLOW_S = 0.2
LOOK_S = 2.0
CANCEL_S = 5.0
OVER = ("finished", "failed", "stopped", "cancelled", "lost")


def cancel(run: RunDir, *, now: bool = False) -> str:
    """Stop a run: at its next boundary with a checkpoint, or at once.

    Returns:
        A sentence that says what happens. Raises `ClusterError` when there is nothing to stop.
    """
    if run.handle.exists():
        return _cancel_job(run, now=now)
    if not is_held(run):
        raise ClusterError(f"{run.path} is not running; there is nothing to cancel")
    pid = int(run.lock.read_text(encoding="ascii"))
    os.kill(pid, signal.SIGINT)
    if now:
        os.kill(pid, signal.SIGTERM)  # a second one, of another kind, so that both are delivered
        return f"every process of {run.path} is being ended"
    return f"{run.path} stops at its next update boundary, with a checkpoint"


def _cancel_job(run: RunDir, *, now: bool) -> str:
    handle = SlurmHandle(run)
    job = queued(handle.client, [handle.job_id]).get(handle.job_id)
    if job is None or not job.alive:
        raise ClusterError(
            f"{run.path} is not queued or running (job {handle.job_id}); there is nothing to cancel"
        )
    if now or job.waiting:
        handle.kill()
        if job.waiting:
            _await_the_end(run, handle)
        return f"job {handle.job_id} is cancelled; resume goes on from the newest checkpoint"
    handle.stop()
    return (
        f"job {handle.job_id} stops at its next update boundary, with a checkpoint; "
        f"--now ends it at once"
    )


def _await_the_end(run: RunDir, handle: SlurmHandle) -> None:
    """A job that has not begun ends at once, and has no batch script to say so."""
    deadline = time.monotonic() + CANCEL_S
    while time.monotonic() < deadline:
        job = queued(handle.client, [handle.job_id]).get(handle.job_id)
        if job is None or not job.alive:
            write_end(run, State.STOPPED)
            return
        time.sleep(FOLLOW_S)


def log_of(run: RunDir, rank: int | None) -> Path:
    """The log to show: a rank's, or rank 0's, or before there is one, the batch script's.

    Raises:
        RunFolderError: the rank has no log.
    """
    path = run.rank_log(rank or 0)
    if path.exists():
        return path
    if rank is not None:
        there = sorted(int(p.stem.split("-")[1]) for p in run.logs.glob("rank-*.log"))
        known = f"there are logs of ranks {there[0]} to {there[-1]}" if there else "no rank began"
        raise RunFolderError(f"{run.path} has no log of rank {rank}; {known}")
    return run.batch_log if run.batch_log.exists() else path


def follow(run: RunDir, rank: int | None) -> Iterator[str]:
    """A log's text as it grows, until the run has ended."""
    offset, path, look = 0, None, 0.0
    status: RunStatus | None = None
    while True:
        over = status is not None and status.state in OVER
        current = run.rank_log(rank or 0)
        if path is None and current.exists():
            path = current
        if path is not None:
            with path.open("rb") as file:
                file.seek(offset)
                content = file.read()
            offset += len(content)
            if content:
                yield content.decode("utf-8", errors="replace")
        if over:
            return
        if time.monotonic() >= look:
            [status], _ = statuses([run])
            if path is None and status.state == "pending":
                sys.stderr.write(f"pending ({status.reason})\n")
            look = time.monotonic() + LOOK_S
        time.sleep(FOLLOW_S)
