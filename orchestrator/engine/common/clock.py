"""Where the seconds of a window go: computing, waiting for other ranks, stepping the optimizer."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager


class Clock:
    """Each moment counts for what began last: waiting within computing is waiting."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A window begins, from nothing."""
        self._spent = {"compute_s": 0.0, "wait_s": 0.0, "optimizer_s": 0.0}
        self._running: list[str] = []
        self._since = 0.0

    def compute(self) -> AbstractContextManager[None]:
        """What happens in it is forward or backward."""
        return _During(self, "compute_s")

    def wait(self) -> AbstractContextManager[None]:
        """What happens in it is talk between ranks."""
        return _During(self, "wait_s")

    def optimize(self) -> AbstractContextManager[None]:
        """What happens in it is clipping and the optimizer's step."""
        return _During(self, "optimizer_s")

    def seconds(self) -> dict[str, float]:
        """Of this window so far, by the names that they have in a `BoundaryReport`."""
        return dict(self._spent)

    def switch(self, what: str | None) -> None:
        """`what` begins; with None what began last is over, and what was before it goes on."""
        now = time.perf_counter()
        if self._running:
            self._spent[self._running[-1]] += now - self._since
        self._since = now
        if what is not None:
            self._running.append(what)
        elif self._running:
            self._running.pop()


class _During:
    """No generator, since one is entered in every micro-step, twice."""

    __slots__ = ("_clock", "_what")

    def __init__(self, clock: Clock, what: str) -> None:
        self._clock, self._what = clock, what

    def __enter__(self) -> None:
        self._clock.switch(self._what)

    def __exit__(self, *error: object) -> None:
        self._clock.switch(None)
