"""Stopping a run and reading its logs from another shell, wherever it runs."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from orchestrator.errors import ClusterError, RunFolderError
from orchestrator.run_folder.files import BLOCK, blocks, open_regular
from orchestrator.report.tables.status_table import UNREADABLE
from orchestrator.report.terminal import HarmlessStream
from orchestrator.run_folder.rundir import RunDir
from orchestrator.clusters.api import State
from orchestrator.outcome.run_result import write_end
from orchestrator.outcome.lock_holder import signal_holder
from orchestrator.scheduler.client import NoClient
from orchestrator.scheduler.jobs import Job, queued
from orchestrator.clusters.slurm.watch import SlurmHandle
from orchestrator.runs.status import statuses

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
    if now:
        # two of different kinds, so that both are delivered
        signal_holder(run, signal.SIGINT, signal.SIGTERM)
        return f"every process of {run.path} is being ended"
    signal_holder(run, signal.SIGINT)
    return f"{run.path} stops at its next update boundary, with a checkpoint"


def _cancel_job(run: RunDir, *, now: bool) -> str:
    handle = SlurmHandle(run)
    job = queued(handle.client, [handle.job_id]).get(handle.job_id)
    if job is None or not job.alive:
        raise ClusterError(
            f"{run.path} is not queued or running (job {handle.job_id}); there is nothing to cancel"
        )
    if not _is_job_of(run, job):
        raise ClusterError(
            f"job {handle.job_id}, which {run.handle} names, is not this run's: it runs "
            f"{job.command}; nothing was sent"
        )
    if now or job.waiting:
        handle.kill()
        if job.waiting:
            _await_the_end(run, handle)
        return f"job {handle.job_id} is cancelled; resume goes on from the newest checkpoint"
    handle.stop()
    still = f"; until then, {job.standstill}" if job.standstill else ""
    return (
        f"job {handle.job_id} stops at its next update boundary, with a checkpoint{still}; "
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


def _is_job_of(run: RunDir, job: Job) -> bool:
    """Whether a job's batch script, as the scheduler knows it, is one in this run's folder."""
    script = os.path.realpath(job.command)
    return Path(script).is_relative_to(os.path.realpath(run.submitit))


def log_of(run: RunDir, rank: int | None) -> Path:
    """The log to show: a rank's, or rank 0's, or before there is one, the batch script's.

    Raises:
        RunFolderError: the rank has no log.
    """
    path = run.rank_log(rank or 0)
    if os.path.lexists(path):
        return path
    if rank is not None:
        there = run.ranks_with_logs()
        known = f"there are logs of ranks {there[0]} to {there[-1]}" if there else "no rank began"
        raise RunFolderError(f"{run.path} has no log of rank {rank}; {known}")
    return run.batch_log if run.batch_log.exists() else path


def text_of(path: Path) -> Iterator[str]:
    """A log's text, made harmless, in bounded memory; nothing when there is no such file."""
    harmless = HarmlessStream()
    try:
        for block in blocks(path):
            yield harmless.feed(block)
    except FileNotFoundError:
        return
    yield harmless.rest()


def follow(run: RunDir, rank: int | None) -> Iterator[str]:
    """A log's text as it grows, made harmless, until the run has ended.

    Raises:
        RunFolderError: whether it has ended cannot be known, since it is damaged or private.
    """
    offset, path, standing = 0, None, _Standing(run)
    harmless = HarmlessStream()
    while True:
        current = run.rank_log(rank or 0)
        if path is None and current.exists():
            path = current
        if path is not None:
            with os.fdopen(open_regular(path), "rb") as file:
                file.seek(offset)
                while content := file.read(BLOCK):
                    offset += len(content)
                    yield harmless.feed(content)
        if standing.over:
            yield harmless.rest()
            return
        standing.look()
        if path is None and standing.news:
            sys.stderr.write(f"pending ({standing.news})\n")


class _Standing:
    """Whether a run is over, asked of the scheduler no more often than watchers may."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._handle: SlurmHandle | None = None
        self._next, self._said = 0.0, ""
        self.over, self.news = False, ""
        if run.handle.exists():
            with contextlib.suppress(ClusterError):  # no scheduler here: the folder has to tell
                self._handle = SlurmHandle(run)

    def look(self) -> None:
        """Wait a moment; `news` is then why it is pending, where that was not told before."""
        self.news = ""
        try:
            if self._handle is not None:
                self.over = self._handle.poll(FOLLOW_S).ended
                job = self._handle.job
                self._tell(job.reason if job is not None and job.waiting else "")
                return
        except NoClient:
            self._handle = None
        time.sleep(FOLLOW_S)
        if time.monotonic() >= self._next:
            [status], _ = statuses([self._run])
            if status.state in UNREADABLE:
                raise RunFolderError(status.reason or f"{self._run.path} cannot be read")
            self.over = status.state in OVER
            self._next = time.monotonic() + LOOK_S

    def _tell(self, reason: str) -> None:
        if reason != self._said:
            self._said = self.news = reason
