"""Seeds and time accounting of micro-steps."""

from __future__ import annotations

import hashlib
import struct
import time
from contextlib import AbstractContextManager


def derived_seed(purpose: str, seed: int, *place: int) -> int:
    """Return a 64-bit seed: the first 8 bytes of BLAKE2b over the numbers, personalised by
    `purpose`.

    Args:
        purpose: keeps uses apart ("step", "data", ...); at most 16 ASCII letters.
        seed: the run's.
        place: where in the run, say update and start; each below 2**63.

    >>> derived_seed("step", 0, 1, 2) == derived_seed("step", 0, 1, 2)
    True
    >>> derived_seed("step", 0, 1, 2) == derived_seed("data", 0, 1, 2)
    False
    """
    packed = struct.pack(f"<{1 + len(place)}q", seed, *place)
    digest = hashlib.blake2b(packed, digest_size=8, person=purpose.encode("ascii")).digest()
    return int.from_bytes(digest, "little")


# ------------------------------------------------------------------ Time accounting


class Clock:
    """Time accounting. Nested activities count once: waiting within computing is waiting."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin a window, from nothing."""
        self._spent = {"compute_s": 0.0, "wait_s": 0.0, "optimizer_s": 0.0}
        self._running: list[str] = []
        self._since = 0.0

    def compute(self) -> AbstractContextManager[None]:
        """Count the time in this context as forward or backward."""
        return _During(self, "compute_s")

    def wait(self) -> AbstractContextManager[None]:
        """Count the time in this context as communication."""
        return _During(self, "wait_s")

    def optimize(self) -> AbstractContextManager[None]:
        """Count the time in this context as clipping and the optimizer's step."""
        return _During(self, "optimizer_s")

    def seconds(self) -> dict[str, float]:
        """Return the seconds of this window so far, by their names in a `BoundaryReport`."""
        return dict(self._spent)

    def switch(self, what: str | None) -> None:
        """Start to count `what`; None ends what started last, and continues the one before."""
        now = time.perf_counter()
        if self._running:
            self._spent[self._running[-1]] += now - self._since
        self._since = now
        if what is not None:
            self._running.append(what)
        elif self._running:
            self._running.pop()


class _During:
    """Context of one activity. Faster than a generator, and entered twice in every micro-step."""

    __slots__ = ("_clock", "_what")

    def __init__(self, clock: Clock, what: str) -> None:
        self._clock, self._what = clock, what

    def __enter__(self) -> None:
        self._clock.switch(self._what)

    def __exit__(self, *error: object) -> None:
        self._clock.switch(None)
