"""What stands between the loop and rank 0's record under a scheduler: the fence, and the clock.

- Nothing is written any more once a newer attempt has begun.
- `cancel` counts whoever sent it, and however its signal fared: it is read at each boundary.
- A stop that could not wait for the boundary is taken inside the window. Weights change at
  boundaries only, so what is saved then is the state after the last one: this window is lost, and
  nothing else; unless the optimizer is sharded, for its shards cannot be gathered in mid-window.
  Rank 0 decides it alone, and the others, who have no part in it, leave when they
  see its departure.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from orchestrator.engine.api import BoundaryReport, Window
from orchestrator.errors import StopRequested
from orchestrator.lifecycle.stopping.stop_signals import StopFlag
from orchestrator.rank.loop import Outcome
from orchestrator.rank.writing.recorder import Recorder, Silent
from orchestrator.rundir.checkpoints import Fence
from orchestrator.rundir.warnings import warn

RECENT = 5
LOOK_S = 1.0
SAVE_MARGIN = 1.5
LEAST_SAVE_S = 0.5


class Guard:
    """Rank 0's: a recorder around the recorder.

    Args:
        hurry: gives how long after a stop signal the scheduler waits before it kills, in seconds;
            None when there is no haste.
        cancelled: whether the run was told to stop for good; asked once a second at the most.
        outcome: where the run stands, as the loop has it.
    """

    def __init__(
        self,
        inner: Recorder,
        *,
        fence: Fence,
        stop: StopFlag,
        hurry: Callable[[], float | None],
        cancelled: Callable[[], bool] = lambda: False,
        outcome: Outcome,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inner, self._fence, self._stop = inner, fence, stop
        self._hurry, self._cancelled, self._clock = hurry, cancelled, clock
        self._looked = -LOOK_S
        self._outcome = outcome
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._save_s = LEAST_SAVE_S
        self._began = clock()
        self._warned = False

    def micro_step(self, update: int, done: int, steps: int) -> None:
        self._inner.micro_step(update, done, steps)
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
        if there.updates and self._inner.can_save():
            self.checkpoint(there.updates, there.samples)
            self._inner.settle()
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
        """Whether the boundary, and a checkpoint after it, would come after the deadline.

        Where nothing could be saved by leaving now, the boundary is hoped for up to the last
        micro-step that can be done in time.
        """
        now = self._clock()
        step_s = (now - self._began) / done if done else 0.0
        if not self._inner.can_save():
            return now + step_s + LEAST_SAVE_S > deadline
        ends = self._began + max(self._recent, default=0.0)
        return max(ends, now + step_s * (steps - done)) + SAVE_MARGIN * self._saving_s > deadline

    def boundary(
        self, window: Window, report: BoundaryReport, *, epoch: int, update_s: float
    ) -> None:
        self._fence.check()
        self._inner.boundary(window, report, epoch=epoch, update_s=update_s)
        self._recent.append(update_s)
        grace_s = self._hurry() if not self._warned else None
        if grace_s is not None and update_s > grace_s:
            self._warned = True
            warn(
                f"an update takes {update_s:.1f} s, longer than the {grace_s:g} s "
                f"that the scheduler gives after a signal: a stop will lose the window under way; "
                f"a larger cluster.signal_ahead_s or fewer accumulation.steps would avoid that"
            )

    def evaluation(self, update: int, epoch: int, figures: dict[str, float]) -> None:
        self._fence.check()
        self._inner.evaluation(update, epoch, figures)

    def checkpoint(self, updates: int, samples: int) -> None:
        self._fence.check()
        began = self._clock()
        self._inner.checkpoint(updates, samples)
        self._save_s = max(LEAST_SAVE_S, self._clock() - began)

    @property
    def _saving_s(self) -> float:
        return max(self._save_s, self._inner.save_s)


class Follower(Silent):
    """Every other rank's: leaves inside a window once rank 0 has."""

    def __init__(self, stop: StopFlag, departure: Path) -> None:
        self._stop, self._departure = stop, departure

    def micro_step(self, update: int, done: int, steps: int) -> None:
        if self._stop.requested and done < steps and self._departure.exists():
            raise StopRequested(f"left inside update {update}, as rank 0 did")
