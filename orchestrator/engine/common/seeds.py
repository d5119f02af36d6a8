"""Seeds of random numbers: functions of the run's seed and a position, such as a micro-step's."""

from __future__ import annotations

import hashlib
import random
import struct
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
