"""The choice of the worker that saves the last boundary of a failed attempt, and its time to do so.

A failed attempt ends in this order: workers that remain have `GRACE_S` to report what they saw and
whether they can save; those that can leave their windows; one of them is chosen, and saves. Then
all are killed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from orchestrator.agent.liveness import LEAST_SILENCE_S
from orchestrator.agent.worker_state import WorkerState

GRACE_S = 1.0
"""Time for the remaining workers to write failure records."""
SAVE_S = 30.0
"""Time for the others to leave their windows, so that one of them saves the last boundary."""
ELECT_S = 5.0
"""Time from the first of them that has left its window to the choice of the one that saves."""


class SaverElection:
    """Choice of who saves: of the live members the one with the most updates, the first of these.
    One that has failed itself comes last: what its state is on a device after an error is not
    certain, and all may have failed alike.

    They differ by one update at most, but only those that have left their windows know theirs.

    Args:
        hang_s: the limit of a hang.

    Attributes:
        saver: the rank that saves; None before it is chosen.
        until: until when the remaining workers have time; None before a worker has failed.
    """

    def __init__(self, hang_s: float) -> None:
        self._hang_s = hang_s
        self._elect_at: float | None = None  # at the latest
        self._answers_by = self._late_answers_by = 0.0
        self.saver: int | None = None
        self.until: float | None = None

    def begin(self, now: float) -> None:
        """Give the workers that a failed one leaves behind a moment."""
        self.until = now + GRACE_S
        self._late_answers_by = self.until + LEAST_SILENCE_S

    def awaits_answer(self, now: float, members: Iterable[WorkerState]) -> bool:
        """Return whether one of the live members that train may answer yet whether it can save. It
        does so at once, but its agent may be late.
        """
        if self.saver is not None or now >= self._late_answers_by:
            return False
        return any(
            worker.training and worker.can_save is None and worker.killed_at is None
            for worker in members
        )

    def end(self, now: float) -> None:
        """Wait no longer, since the saver has ended: it has saved, or will not any more."""
        if self.until is not None:
            self.until = min(self.until, now + GRACE_S)

    def elect(self, now: float, members: Sequence[WorkerState]) -> None:
        """Choose one of the live members, if that is due."""
        able = [worker for worker in members if worker.can_save]
        if not able:
            return
        if self._elect_at is None:
            self._elect_at = self.until = now + SAVE_S
            self._answers_by = now + GRACE_S
        # One that has not answered yet may have the most updates.
        silent = any(worker.can_save is None for worker in members)
        if silent and now < self._answers_by:
            return
        ready = [worker for worker in able if worker.left_after is not None]
        if not ready:
            return
        # While only failed ones are ready, the others get all of `SAVE_S`.
        if not all(worker.failed for worker in ready):
            self._elect_at = min(self._elect_at, now + ELECT_S)
        if len(ready) == len(able) or now >= self._elect_at:
            self.saver = max(
                ready, key=lambda worker: (not worker.failed, worker.left_after or 0)
            ).rank
            # A large state takes as long as a slow disk needs.
            self.until = now + max(SAVE_S, self._hang_s)
