"""Time accounting of a window: seconds of computing, of waiting and of the optimizer's step."""

from __future__ import annotations

import time
from typing import Any


class Activity:
    """Context whose seconds a `Clock` counts. Entered in every micro-step, so no generator."""

    __slots__ = ("_clock", "spent_s")

    def __init__(self, clock: Clock) -> None:
        self._clock, self.spent_s = clock, 0.0

    def __enter__(self) -> None:
        clock, now = self._clock, time.perf_counter()
        if clock.running:
            clock.running[-1].spent_s += now - clock.since
        clock.running.append(self)
        clock.since = now

    def __exit__(self, *error: object) -> None:
        clock, now = self._clock, time.perf_counter()
        if clock.running:
            clock.running.pop().spent_s += now - clock.since
        clock.since = now


class Clock:
    """Time accounting. Nested activities count once: waiting within computing is waiting.

    Attributes:
        compute: forward and backward.
        wait: communication.
        optimize: clipping and the optimizer's step.
        running, since: the activities that were entered, and when the last one was entered or left.
    """

    def __init__(self) -> None:
        self.compute, self.wait, self.optimize = Activity(self), Activity(self), Activity(self)
        self.begin()

    def begin(self) -> None:
        """Begin a window, from nothing."""
        self.compute.spent_s = self.wait.spent_s = self.optimize.spent_s = 0.0
        self.running: list[Activity] = []
        self.since = 0.0

    def seconds(self) -> dict[str, Any]:
        """Return the seconds of this window so far, by their names in a `BoundaryReport`."""
        return {
            "compute_s": self.compute.spent_s,
            "wait_s": self.wait.spent_s,
            "optimizer_s": self.optimize.spent_s,
        }
