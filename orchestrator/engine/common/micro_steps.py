"""Seeds and time accounting of micro-steps."""

from __future__ import annotations

import hashlib
import random
import struct
import time
from typing import Any

import numpy as np


def derived_seed(purpose: str, seed: int, *position: int) -> int:
    """Return a 64-bit seed: the first 8 bytes of BLAKE2b over the numbers, personalised by
    `purpose`.

    Args:
        purpose: keeps uses apart ("step", "data", ...); at most 16 ASCII letters.
        position: where in the run, say update and start; each below 2**63.

    >>> derived_seed("step", 0, 1, 2) == derived_seed("step", 0, 1, 2)
    True
    >>> derived_seed("step", 0, 1, 2) == derived_seed("data", 0, 1, 2)
    False
    """
    packed = struct.pack(f"<{1 + len(position)}q", seed, *position)
    digest = hashlib.blake2b(packed, digest_size=8, person=purpose.encode("ascii")).digest()
    return int.from_bytes(digest, "little")


def seed_python_and_numpy(seed: int) -> None:
    """Seed the global generators of both, from 64 bits.

    They are the same algorithm: from the same words they would give the same numbers, so
    augmentations that draw from both would be correlated. So NumPy's gets one word more, a 1, and
    its state is that of `np.random.seed([seed & 0xFFFFFFFF, seed >> 32, 1])`. That call costs 150
    microseconds between two micro-steps, most of them in checks of its argument; Python's generator
    takes the same words from one number, and hands its state over in a third of that.
    """
    random.seed(seed)
    _words_for_numpy.seed(seed | 1 << 64)
    *words, position = _words_for_numpy.getstate()[1]
    state: Any = "MT19937", words, position  # NumPy's stubs want an array, which takes longer
    np.random.set_state(state)


_words_for_numpy = random.Random()  # noqa: S311  # no secret


# ------------------------------------------------------------------ Time accounting


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
