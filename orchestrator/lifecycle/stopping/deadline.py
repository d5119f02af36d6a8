"""Deadline of a stop: from the signal to the kill, by the scheduler's answer or the configuration.

Without an answer, the shortest time that the kind of signal allows holds.

- The job is no longer RUNNING (requeued, cancelled, a node set down, its time over): KillWait.
- PreemptTime is set: GraceTime (the partition's or the QOS's; see EndTime), then KillWait.
- SIGTERM while it still runs (scancel --full, an srun that gives up): KillWait.
- Another signal: until EndTime, which is the time limit, then KillWait; without a limit, never.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from orchestrator.lifecycle.stopping.stop_signals import StopFlag

ASK_S = 1.0
LATE_S = 90.0
"""SLURM sends its notice of a time limit up to a minute early, and minds limits twice a minute."""


class JobStatus(Protocol):
    """What the deadline reads of a scheduler's job; see `orchestrator.slurm_client.JobStatus`."""

    @property
    def state(self) -> str: ...
    @property
    def restarts(self) -> int: ...
    @property
    def reason(self) -> str: ...
    @property
    def preempted_at(self) -> float | None: ...
    @property
    def ends_at(self) -> float | None: ...


KILL_WAIT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """Stop times from the controller's configuration, in seconds.

    Attributes:
        kill_wait_s: KillWait, between SIGTERM and SIGKILL.
        preempt_s: GraceTime of the job's partition, before that; None without preemption.
        ahead_s: before a time limit.
    """

    kill_wait_s: float = KILL_WAIT_S
    preempt_s: float | None = None
    ahead_s: float = 60.0

    @classmethod
    def read(cls, submission: dict[str, Any], ahead_s: float) -> Notice:
        """Read the times that the launcher wrote to submission.json."""
        return cls(
            kill_wait_s=float(submission.get("kill_wait_s", KILL_WAIT_S)),
            preempt_s=submission.get("preempt_grace_s"),
            ahead_s=ahead_s,
        )

    @property
    def shortest_s(self) -> float:
        """Return the shortest of the expected stops: a time limit, and preemption."""
        if self.preempt_s is None:
            return self.ahead_s
        return min(self.ahead_s, self.preempt_s + self.kill_wait_s)


def killed_at(
    stop: StopFlag, job: JobStatus | None, notice: Notice, now: float, clock: float
) -> float | None:
    """Return when the kill comes, by the clock of `stop`; None if none will come.

    Args:
        job: the scheduler's answer after the latest signal; None before it.
        now, clock: the same moment in seconds since 1970, and by the clock of `stop`.
    """
    term = stop.times.get(signal.SIGTERM)
    first = min(stop.times.values(), default=clock)
    if job is None:
        return first + notice.shortest_s if term is None else term + notice.kill_wait_s
    if job.state != "RUNNING":
        return (first if term is None else term) + notice.kill_wait_s
    if job.preempted_at is not None:
        grace_s = job.ends_at - job.preempted_at if job.ends_at else notice.preempt_s or 0.0
        return first + max(0.0, grace_s) + notice.kill_wait_s
    if term is not None:
        return term + notice.kill_wait_s
    return None if job.ends_at is None else clock + job.ends_at - now + notice.kill_wait_s


def reason(job: JobStatus, now: float, ahead_s: float, restarts: int = 0) -> str | None:
    """Return why the scheduler wants the job to stop; None if it does not show.

    Args:
        ahead_s: how long before a time limit the ranks are signalled.
        restarts: how often the job had been restarted when this start began.
    """
    if job.preempted_at is not None:
        return "preempted"
    if job.restarts > restarts:
        return "requeued (scontrol requeue, or a node that was set down)"
    # The end time of an ended or ending job is no limit.
    left_s = job.ends_at - now if job.ends_at and job.state == "RUNNING" else None
    if job.reason == "TimeLimit" or (left_s is not None and left_s < ahead_s + LATE_S):
        return "near its time limit"
    return None


class Deadline:
    """Rank 0's query to the scheduler, once for each new signal, with a bounded wait.

    Args:
        ask: returns the job's status; may raise, or never return.
    """

    def __init__(self, stop: StopFlag, notice: Notice, ask: Callable[[], JobStatus | None]) -> None:
        self._stop, self._notice, self._ask = stop, notice, ask
        self._asked_for = 0
        self._job: JobStatus | None = None

    def grace_s(self) -> float | None:
        """Return seconds between the first signal and the kill; None if no kill will come.

        Before any signal, the shortest possible time.
        """
        if not self._stop.received:
            return self._notice.shortest_s
        end = killed_at(self._stop, self._heard(), self._notice, time.time(), time.monotonic())
        return None if end is None else end - self._stop.time

    def why(self, restarts: int) -> str:
        """Return the reason for the stop: the scheduler's if it gives one, else the signal."""
        job = self._heard()
        known = reason(job, time.time(), self._notice.ahead_s, restarts) if job else None
        return known or self._stop.words

    def _heard(self) -> JobStatus | None:
        if self._stop.received != self._asked_for:
            self._asked_for, self._job = self._stop.received, None
            thread = threading.Thread(target=self._look, name="deadline", daemon=True)
            thread.start()
            thread.join(ASK_S)
        return self._job

    def _look(self) -> None:
        asked_for = self._asked_for
        try:
            job = self._ask()
        except Exception as error:  # noqa: BLE001  # no scheduler, no command: the configured times hold
            print(f"the scheduler cannot be asked how long a stop may take: {error}", flush=True)
            return
        if asked_for == self._asked_for:
            self._job = job
