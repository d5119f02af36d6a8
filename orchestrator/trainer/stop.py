"""A stop of a run: its request, its deadline, and the departure of an attempt that continues later.

Agents act on signals and send workers a message. All ranks then stop after the same update, since
the request travels with the boundary's reduction. If that boundary would come after the scheduler's
kill, rank 0 saves what the last one left and leaves inside the window, and the others follow. A
notice that takes half of the time limit or more comes too early: rank 0 requests the stop once the
end is near. It writes `departure.json`, and the batch script requeues the job
(`clusters.slurm.finalize`): no worker needs SLURM's commands, which a container may lack.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.agent.topology import Topology
from orchestrator.client.checkpoint_manager import CheckpointManager
from orchestrator.client.loop import Callback, CompletedUpdate, TrainingProgress
from orchestrator.config.schema import end_s, notice_s
from orchestrator.errors import StopRequested
from orchestrator.rundir.checkpoints import Fence
from orchestrator.rundir.folder import RESUMED, RunDir
from orchestrator.rundir.metrics import read_progress, recent_records, updates_of
from orchestrator.rundir.outcome import describe_culprit, read_outcome
from orchestrator.rundir.restarts import read_departure
from orchestrator.rundir.srun_log import cancellation, node_failure
from orchestrator.rundir.warnings import warn

KILL_WAIT_S = 30.0
CANCEL_CHECK_S = 1.0
LEAST_SAVE_S = 0.5
REPEAT_S = 5.0
"""Within which one signal may reach an agent several times: from SLURM, and from its parent."""
NOTICE = signal.SIGUSR2
"""SLURM's notice of a time limit, by `--signal` of the batch script."""


class StopFlag:
    """Request to stop, set by the agent's messages and read by the loop.

    Attributes:
        signal: the latest one, None before any.
        times: `time.monotonic` of the first request of each kind; None: not by a signal.
        defers: the first notice of the time limit requests no stop yet: `LeaveInTime` does.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.times: dict[signal.Signals | None, float] = {}
        self.defers = False

    def set(self, number: signal.Signals | None = None) -> None:
        """Record a request. `number`: the signal that the agent received, if any."""
        self.signal, now = number or self.signal, time.monotonic()
        first = self.times.setdefault(number, now)
        if self.defers and now - first > REPEAT_S:  # SLURM sends its notice once: a person's
            self.defers, self.times[number] = False, now

    @property
    def requested(self) -> bool:
        return any(number is not NOTICE or not self.defers for number in self.times)

    @property
    def description(self) -> str:
        """Describe the request for people."""
        return "asked to stop" + (f" by {self.signal.name}" if self.signal else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class GracePeriods:
    """Times between a stop signal and SIGKILL, from the scheduler's configuration.

    Attributes:
        kill_wait_s: KillWait, between SIGTERM and SIGKILL.
        preempt_s: GraceTime before that, when preempted; None without preemption.
        ahead_s: how long before the time limit the job is signalled.
        end_s: if that takes half of the limit or more, the time to keep for the job's end, until
            which the training continues after the signal; else None.
        job_ends: time of the limit, by `time.monotonic`; None where it is not known.
    """

    kill_wait_s: float = KILL_WAIT_S
    preempt_s: float | None = None
    ahead_s: float = 60.0
    end_s: float | None = None
    job_ends: float | None = None

    @classmethod
    def read(
        cls, submission: dict[str, Any], ahead_s: int, job_began: float | None = None
    ) -> GracePeriods:
        """Read the times that the launcher wrote to submission.json.

        Args:
            ahead_s: `cluster.signal_ahead_s`.
            job_began: by `time.monotonic`; None where it is not known.
        """
        limit_s: float | None = submission.get("time_limit_s")
        is_long = limit_s is not None and ahead_s >= limit_s / 2
        return cls(
            kill_wait_s=float(submission.get("kill_wait_s", KILL_WAIT_S)),
            preempt_s=submission.get("preempt_grace_s"),
            ahead_s=notice_s(ahead_s, limit_s),
            end_s=end_s(limit_s) if limit_s is not None and is_long else None,
            job_ends=None if limit_s is None or job_began is None else job_began + limit_s,
        )

    @property
    def shortest_s(self) -> float:
        """Return the shortest time that any stop leaves: a time limit's, or preemption's."""
        if self.preempt_s is None:
            return self.ahead_s
        return min(self.ahead_s, self.preempt_s + self.kill_wait_s)

    def deadline(self, stop: StopFlag) -> float:
        """Return the earliest possible time of the kill, by `time.monotonic`."""
        began = min(stop.times.values())
        first = began + self.shortest_s
        if self.end_s is not None:
            # Unless the limit was extended meanwhile.
            if self.job_ends is not None and began < self.job_ends:
                # A preemption may send the same signal, where there is any.
                is_limit = stop.defers and self.preempt_s is None
                first = self.job_ends if is_limit else min(first, self.job_ends)
            if stop.defers:
                first -= self.end_s
        term = stop.times.get(signal.SIGTERM)
        return first if term is None else min(first, term + self.kill_wait_s)


# ----------------------------------------------------------------------
# Callbacks of the loop under a scheduler.


class LeaveInTime(Callback):
    """Callback of rank 0 that leaves a window whose boundary would come after the kill.

    It also reads the file `cancel`, which works without the scheduler, and writes nothing once a
    newer attempt has begun.

    Args:
        grace: None if the run ends for good, so that there is nothing to save in time.
        cancelled: returns whether a person stopped the run for good; called once a second at most.
    """

    def __init__(
        self,
        checkpoints: CheckpointManager,
        *,
        fence: Fence,
        stop: StopFlag,
        grace: GracePeriods | None,
        cancelled: Callable[[], bool],
        progress: TrainingProgress,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._checkpoints, self._fence, self._stop = checkpoints, fence, stop
        self._grace, self._cancelled, self._clock = grace, cancelled, clock
        self._progress = progress
        self._checked = -CANCEL_CHECK_S
        self._recent: deque[float] = deque(maxlen=5)
        self._began = self._last_boundary = clock()
        self._longest_s = 0.0  # between two boundaries, with evaluations and checkpoints
        self._warned = False

    def on_micro_step(self, update: int, done: int, steps: int) -> None:
        if done == 0:
            self._began = self._clock()
        if done == steps:
            now = self._clock()
            if self._progress.done is not None:  # else it began with the start of this attempt
                self._longest_s = max(self._longest_s, now - self._last_boundary)
            self._last_boundary = now
            if self._is_last(now):
                self._stop.defers = False
            if now - self._checked >= CANCEL_CHECK_S:
                self._checked = now
                if self._cancelled():
                    self._stop.set()
            return
        if not self._stop.times or self._grace is None or self._cancelled():
            return
        deadline = self._grace.deadline(self._stop)
        if not self._too_late(done, steps, deadline):
            return
        lost, progress = "", self._progress
        if progress.updates and self._checkpoints.can_save():
            self.before_record()
            self._checkpoints.save_now(progress)
        elif progress.updates:
            lost = "; what came after the newest checkpoint is lost, since the optimizer is sharded"
        grace_s = deadline - min(self._stop.times.values())
        raise StopRequested(
            f"left inside update {update}: its boundary would have come after the grace of "
            f"{grace_s:g} s{lost}"
        )

    def _is_last(self, now: float) -> bool:
        """Return whether another update and its checkpoint would take longer than a notice of the
        time limit leaves.
        """
        if not (self._stop.defers and self._stop.times) or self._grace is None:
            return False
        update_s = max(self._longest_s, now - self._began)
        return now + update_s + self._checkpoint_s > self._grace.deadline(self._stop)

    @property
    def _checkpoint_s(self) -> float:
        return 1.5 * max(LEAST_SAVE_S, self._checkpoints.save_s)

    def _too_late(self, done: int, steps: int, deadline: float) -> bool:
        """Return whether the boundary and a checkpoint after it would come after the deadline.

        If leaving now could not save anything, wait for the boundary up to the last micro-step that
        ends in time.
        """
        now = self._clock()
        step_s = (now - self._began) / done if done else 0.0
        if not self._checkpoints.can_save():
            return now + step_s + LEAST_SAVE_S > deadline
        ends = self._began + max(self._recent, default=0.0)
        return max(ends, now + step_s * (steps - done)) + self._checkpoint_s > deadline

    def before_record(self) -> None:
        self._fence.check()

    def on_boundary(self, done: CompletedUpdate) -> None:
        update_s = done.seconds
        self._recent.append(update_s)
        if self._warned or self._grace is None or update_s <= self._grace.shortest_s:
            return
        self._warned = True
        warn(
            f"an update takes {update_s:.1f} s, longer than the {self._grace.shortest_s:g} s that "
            f"the scheduler gives after a signal: a stop will lose the window under way; a larger "
            f"cluster.signal_ahead_s or fewer accumulation.steps would avoid that"
        )


class Follower(Callback):
    """Callback of the other ranks that leaves inside a window once rank 0 has."""

    def __init__(self, stop: StopFlag, departure: Path) -> None:
        self._stop, self._departure = stop, departure

    def on_micro_step(self, update: int, done: int, steps: int) -> None:
        if self._stop.times and done < steps and self._departure.exists():
            raise StopRequested(f"left inside update {update}, as rank 0 did")


# ----------------------------------------------------------------------
# The departure of an attempt whose run continues.


def restart_reason(run: RunDir, attempt: int) -> str | None:
    """Return why the attempt before this one ended; None if it left no note."""
    before = [number for number in run.attempt_numbers() if number < attempt]
    if not before:
        return None
    last = max(before)
    departure = read_departure(run, last)
    if departure is not None:
        return str(departure["why"])
    outcome = read_outcome(run, last)
    if outcome is not None and outcome.lost:
        return outcome.lost
    culprit = outcome.culprit if outcome is not None else None
    secondary = {failure["rank"] for failure in run.failures(last) if failure["secondary"]}
    # srun's log also has the nodes whose loss the attempt has survived before it ended.
    is_consequence = culprit is None or culprit.rank in secondary
    if is_consequence and (failed := node_failure(run, last)):
        return failed  # the scheduler ended the job, agents included
    if is_consequence and (cancelled := cancellation(run, last)):
        return f"{cancelled}; its ranks had too little time to stop"
    if culprit is None:
        return None
    return describe_culprit(culprit.to_json()).split("\n", maxsplit=1)[0]


def lost_progress(run: RunDir, attempt: int, updates: int) -> tuple[int, int]:
    """Return how many updates, and micro-steps of the next one, were done beyond `updates` before
    this attempt, and are lost. What an earlier restart has noted is not counted again.
    """
    records = updates_of(recent_records(run.metrics))
    for number in reversed([number for number in run.attempt_numbers() if number < attempt]):
        if (progress := read_progress(run.progress(number))) is not None:  # a program writes none
            recorded = [r["update"] + 1 for r in records if r.get("attempt", 0) == number]
            done = max([progress.update, *recorded[-1:]])
            steps = progress.done if progress.update == done >= updates else 0
            return max(0, done - updates), steps
        if run.restart(number).exists():
            break
    return 0, 0


def restart_note(run: RunDir, attempt: int, topology: Topology, updates: int) -> dict[str, object]:
    """Return the content of restart.json for an attempt that begins after `updates` updates."""
    queued = topology.scheduled and not run.read_submission().get("attended")
    why = RESUMED
    in_place = run.srun_restarts(topology.job_id).exists()
    if topology.restarts or in_place or not queued:  # else a person submitted it again
        if queued:
            why = "it ended without a message: a node failed, or the time to stop was too short"
        why = restart_reason(run, attempt) or why
    lost_updates, lost_micro_steps = lost_progress(run, attempt, updates)
    return {
        "attempt": attempt,
        "restarts": topology.restarts,
        "why": why,
        "resumed_from": updates,
        "lost_updates": lost_updates,
        "lost_micro_steps": lost_micro_steps,
    }
