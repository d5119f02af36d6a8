"""What a worker does beside training: signs of life, the fence, and its way out."""

from __future__ import annotations

import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from orchestrator.agent.liveness import FAILED, Patience
from orchestrator.agent.topology import Topology
from orchestrator.config.schema import SIGNAL_AHEAD_S, Config
from orchestrator.engine.api import Engine
from orchestrator.errors import (
    EXIT_FAILED,
    Evicted,
    RankHangs,
    StopRequested,
    Unrecoverable,
)
from orchestrator.rundir.checkpoints import Fence
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.warnings import warn
from orchestrator.trainer.agent_link import AgentLink, link_to_agent
from orchestrator.trainer.failure import failure_of, write_failure
from orchestrator.trainer.loop import Callback, Done, Outcome
from orchestrator.trainer.recorder import Recorder, restart_note
from orchestrator.trainer.stop import (
    Deadline,
    Notice,
    StopFlag,
    ask_job_status,
    depart,
    goes_on,
    leave_without,
    requeues,
)
from orchestrator.trainer.survival import Survivors

# ----------------------------------------------------------------------
# Callbacks of the loop under a scheduler: the fence, and leaving before the scheduler kills.

RECENT = 5
LOOK_S = 1.0
SAVE_MARGIN = 1.5
LEAST_SAVE_S = 0.5


class GracePeriod(Callback):
    """Rank 0's: leave a window that would outlast the time between a stop signal and SIGKILL, and
    refuse to record anything once a newer attempt has begun.

    Args:
        hurry: gives how long after a stop signal the scheduler waits before it kills, in seconds;
            None when there is no haste.
        cancelled: whether the run was told to stop for good; asked once a second at the most.
        outcome: where the run stands, as the loop has it.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        fence: Fence,
        stop: StopFlag,
        hurry: Callable[[], float | None],
        cancelled: Callable[[], bool] = lambda: False,
        outcome: Outcome,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recorder, self._fence, self._stop = recorder, fence, stop
        self._hurry, self._cancelled, self._clock = hurry, cancelled, clock
        self._looked = -LOOK_S
        self._outcome = outcome
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._began = clock()
        self._warned = False

    def on_micro_step(self, update: int, done: int, steps: int) -> None:
        if done == 0:
            self._began = self._clock()
        if done == steps:
            self._look_for_cancel()
        if not self._stop.requested or done == steps:
            return
        grace_s = self._hurry()
        if grace_s is None or not self._too_late(done, steps, self._stop.time + grace_s):
            return
        lost, there = "", self._outcome
        if there.updates and self._recorder.can_save():
            self.before_record()
            self._recorder.on_checkpoint(there.updates, there.samples)
            self._recorder.settle()
        elif there.updates:
            lost = "; what came after the newest checkpoint is lost, since the optimizer is sharded"
        raise StopRequested(
            f"left inside update {update}: its boundary would have come after the grace of "
            f"{grace_s:g} s{lost}"
        )

    def _look_for_cancel(self) -> None:
        now = self._clock()
        if now - self._looked >= LOOK_S:
            self._looked = now
            self._stop.asked = self._stop.asked or self._cancelled()

    def _too_late(self, done: int, steps: int, deadline: float) -> bool:
        """Return whether the boundary and a checkpoint after it would come after the deadline.

        If leaving now could not save anything, wait for the boundary up to the last micro-step that
        ends in time.
        """
        now = self._clock()
        step_s = (now - self._began) / done if done else 0.0
        if not self._recorder.can_save():
            return now + step_s + LEAST_SAVE_S > deadline
        ends = self._began + max(self._recent, default=0.0)
        save_s = SAVE_MARGIN * max(LEAST_SAVE_S, self._recorder.save_s)
        return max(ends, now + step_s * (steps - done)) + save_s > deadline

    def before_record(self) -> None:
        self._fence.check()

    def on_boundary(self, done: Done) -> None:
        update_s = done.seconds
        self._recent.append(update_s)
        grace_s = self._hurry() if not self._warned else None
        if grace_s is not None and update_s > grace_s:
            self._warned = True
            warn(
                f"an update takes {update_s:.1f} s, longer than the {grace_s:g} s "
                f"that the scheduler gives after a signal: a stop will lose the window under way; "
                f"a larger cluster.signal_ahead_s or fewer accumulation.steps would avoid that"
            )


class Follower(Callback):
    """Every other rank's: leave inside a window once rank 0 has."""

    def __init__(self, stop: StopFlag, departure: Path) -> None:
        self._stop, self._departure = stop, departure

    def on_micro_step(self, update: int, done: int, steps: int) -> None:
        if self._stop.requested and done < steps and self._departure.exists():
            raise StopRequested(f"left inside update {update}, as rank 0 did")


# ----------------------------------------------------------------------
# Times of all ranks in a few windows, which the report draws as a timeline.

LATEST = 1024  # windows that a rank keeps, beside the first
Row = tuple[int, tuple[float, ...]]  # an update, and its seconds in the order of `PARTS`
KINDS = ("first", "typical", "slowest", "last")
PARTS = ("compute_s", "wait_s", "optimizer_s", "update_s")
NONE = -1  # in the place of an update


class RankTimes(Callback):
    """The seconds of one rank's windows, in one attempt.

    Args:
        file: where rank 0 writes what all ranks tell; None on the others.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._first: Row | None = None
        self._latest = deque[Row](maxlen=LATEST)
        self._meetings = 0
        self._found: dict[str, dict[str, Any]] = {}  # rank 0's

    def on_boundary(self, done: Done) -> None:
        report = done.report
        row = (report.update, (report.compute_s, report.wait_s, report.optimizer_s, done.seconds))
        if self._first is None:
            self._first = row
        else:
            self._latest.append(row)

    def on_meeting(self, engine: Engine, *, last: bool) -> None:
        """Gather the seconds of chosen windows from all ranks, ever more seldom."""
        self._meetings += 1
        seldom = not self._meetings & (self._meetings - 1)  # a power of two
        if self._first is None or not (seldom or last):
            return
        rows = list(self._latest) or [self._first]
        chosen = [int(update) for update in engine.gather(self._choice(self._first, rows))[0]]
        mine = dict([self._first, *rows])
        unknown = (math.nan,) * len(PARTS)
        told = engine.gather([s for update in chosen for s in mine.get(update, unknown)])
        if self._file is not None:
            self._take(chosen, told)
            self._write(self._file)

    def _choice(self, first: Row, rows: Sequence[Row]) -> list[float]:
        """Choose an update for each of `KINDS`; `NONE` keeps the present one. Rank 0 decides."""
        by_length = sorted(rows, key=_length)
        slowest, typical = by_length[-1], by_length[len(by_length) // 2]
        before = self._found.get("slowest")
        exceeded = before is None or _length(slowest) > before["update_s"][0]
        chosen = (
            None if "first" in self._found else first,
            typical,
            slowest if exceeded else None,
            rows[-1],
        )
        return [float(NONE if one is None else one[0]) for one in chosen]

    def _take(self, chosen: Sequence[int], rows: Sequence[Sequence[float]]) -> None:
        for place, (kind, update) in enumerate(zip(KINDS, chosen, strict=True)):
            if update == NONE:
                continue
            columns = {
                part: [round(row[place * len(PARTS) + number], 6) for row in rows]
                for number, part in enumerate(PARTS)
            }
            self._found[kind] = {"kind": kind, "update": update, **columns}

    def _write(self, file: Path) -> None:
        try:
            write_json(file, {"windows": [self._found[k] for k in KINDS if k in self._found]})
        except OSError as error:  # a picture less; what is trained is worth more
            why = error.strerror or str(error)
            warn(f"{file.name} could not be written: {why}", kind="timeline not written")


def _length(row: Row) -> float:
    return row[1][-1]


class PlaceMarks(Callback):
    """Mark each place of the loop for the signs of life, on every rank.

    Args:
        waits_unmarked: the transport's collectives return before they are done (accelerators), so
            that a rank may wait for others anywhere in a boundary.
    """

    def __init__(self, life: AgentLink, *, waits_unmarked: bool) -> None:
        self._life, self._waits_unmarked = life, waits_unmarked

    def on_micro_step(self, update: int, done: int, steps: int) -> None:
        if done < steps:
            self._life.at("micro-step %d of %d of update %d", done + 1, steps, update + 1)
        else:
            self._life.at("the boundary of update %d", update + 1, waits=self._waits_unmarked)

    def on_boundary(self, done: Done) -> None:
        after = done.window.update + 1
        self._life.at("what follows update %d (records, evaluation, checkpoint)", after)


# ----------------------------------------------------------------------
# Signs of life to the agent, and how a rank ends.

WAITS_UNMARKED = ("nccl", "hccl")


class Attendance:
    """A rank's state as its agent sees it. Call `begin` before the ranks meet, and always `end`."""

    def __init__(self, run: RunDir, attempt: int, topology: Topology, stop: StopFlag) -> None:
        self._run, self._attempt, self._topology, self._stop = run, attempt, topology, stop
        self._failure: dict[str, Any] | None = None
        log = run.rank_log(topology.rank)
        self.life = self._life = AgentLink(log, link_to_agent(), self._hang)
        self._life.on_message(self._heed_stop)
        self._life.begin()
        self._fence = Fence(run.newest_attempt, attempt)
        self._requeue, self._ahead_s = True, 0.0
        self._left: Survivors | None = None
        # Writes, and decides what one rank has to.
        self.leads = topology.rank == 0 and not topology.replaces

    def _heed_stop(self, message: dict[str, Any]) -> None:
        if "stop" in message:
            self._stop.take(signal.Signals[message["stop"]])

    def begin(self, config: Config) -> None:
        """Publish this attempt; judge from now on whether this worker still gets anywhere.

        Raises:
            StaleAttempt: a newer attempt has begun.
        """
        self._requeue = requeues(config.cluster.requeue, config.cluster.allocation)
        self._ahead_s = float(config.cluster.signal_ahead_s or SIGNAL_AHEAD_S)
        self._life.expect(Patience.of(config.cluster))
        if self._topology.scheduled and self._topology.rank == 0:
            self._fence.take()

    def _hang(self, sentence: str, stack: str) -> None:
        """End this rank, which makes no progress any more. Called in the thread of `AgentLink`."""
        error = RankHangs(sentence)
        error.add_note(f"its stack:\n{stack}")
        print(f"its stack:\n{stack}\nerror: {sentence}", flush=True)
        self.failed(error)
        self._life.say(FAILED, self._failure)
        os._exit(EXIT_FAILED)

    def callbacks(
        self, recorder: Recorder | None, outcome: Outcome, *, transport: str
    ) -> list[Callback]:
        """Return what follows the loop on this rank, in a new group.

        Args:
            recorder: on the rank that writes.
        """
        self.leads = recorder is not None
        times = RankTimes(self._run.timeline(self._attempt) if recorder else None)
        found: list[Callback] = [
            PlaceMarks(self._life, waits_unmarked=transport in WAITS_UNMARKED),
            times,
        ]
        scheduled = self._topology.scheduled
        if recorder is None:
            follower = Follower(self._stop, self._run.departure(self._attempt))
            return [*found, follower] if scheduled else found
        if self._attempt and outcome.done is None and not outcome.returned:
            note = restart_note(self._run, self._attempt, self._topology, outcome.updates)
            recorder.note["restart"] = note
            write_json(self._run.restart(self._attempt), note)
        found.append(recorder.progress)
        if scheduled:
            found.append(self._grace_period(recorder, outcome))
        return [*found, recorder]

    def _grace_period(self, recorder: Recorder, outcome: Outcome) -> GracePeriod:
        cancelled = self._run.cancel.exists
        return GracePeriod(
            recorder,
            fence=self._fence,
            stop=self._stop,
            hurry=lambda: self._deadline.grace_s() if self._requeue and not cancelled() else None,
            cancelled=cancelled,
            outcome=outcome,
        )

    @cached_property
    def _deadline(self) -> Deadline:
        notice = Notice.read(self._run.read_submission(), self._ahead_s)
        return Deadline(self._stop, notice, lambda: ask_job_status(self._topology.job_id))

    def allow_result(self) -> None:
        """Raise `StaleAttempt` when a newer attempt writes result.json."""
        if self._topology.scheduled:
            self._fence.check()

    def leave(self, updates: int | None) -> bool:
        """After a stop, on rank 0: note the departure if the run goes on later; return whether."""
        if not goes_on(self._run, self._topology, requeue=self._requeue):
            return False
        self._fence.check()
        depart(self._run, self._attempt, self._why_stopped(), updates)
        return True

    def _why_stopped(self) -> str:
        """Return the reason of a stop. Only the leading rank asks the scheduler."""
        if self.leads:
            return self._deadline.why(self._topology.restarts)
        return self._stop.words

    def why_for_good(self) -> str | None:
        """Return why a stop ends the run for good; None if a person asked for its end."""
        run, told = self._run, "{}; with cluster.requeue=false it does not start again"
        queued = self._topology.scheduled and not run.read_submission().get("held")
        return told.format(self._why_stopped()) if queued and not run.cancel.exists() else None

    def excused(self, error: BaseException) -> bool:
        """Return whether the attempt ends in order by this error, since its job starts again."""
        return (
            isinstance(error, Unrecoverable)
            and self._topology.scheduled
            and self._requeue
            and leave_without(self._run, self._attempt, error)
        )

    def restarted(self) -> None:
        """Write the reason of a restart before a program starts. Rank 0 only."""
        if self._attempt and self._topology.rank == 0:
            note = restart_note(self._run, self._attempt, self._topology, 0)
            write_json(self._run.restart(self._attempt), note)

    def at_a_program(self) -> None:
        """Mark that the main thread waits for a program."""
        self._life.at("its program", waits=True)

    def stands_before(self, since: float | None) -> None:
        """Report since when the ranks wait for this rank's program; None: it has joined them."""
        said = None
        if since is not None:
            at = "and has not opened the port where the ranks meet"
            where = "the start of its program"
            said = {"where": where, "since": since, "at": at, "stack": []}
        self._life.tell_behind(said)

    def goes_on_with(self, left: Survivors) -> None:
        """Survive losses from now on: tell the others of this worker's end before it ends."""
        self._left = left

    def at_the_end(self) -> None:
        """Mark the end of the loop: only the result follows."""
        self._life.at("the end (result, goodbye to the others)")

    def failed(self, error: BaseException) -> None:
        """Record what ended this worker."""
        if self._left is not None:
            self._left.end(FAILED)
        self._failure = failure_of(self._topology.rank, self._topology.node, error)
        if not isinstance(error, Evicted):  # the others go on
            write_failure(self._run, self._attempt, self._failure)

    def end(self, word: str) -> None:
        """Say how this worker ended: without it, it counts as lost."""
        if self._left is not None:
            self._left.end(word)
        self._life.say(word, self._failure)
