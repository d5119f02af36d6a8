"""Random numbers as pure functions of the run's seed and of a place in the data.

A micro-step's numbers depend on (seed, update, start) and nothing else: not on the rank, the number
of ranks, or what was computed before. So dropout repeats after a resume, and in reproducible mode
on any number of ranks.
"""

from __future__ import annotations

import hashlib
import random
import struct

import numpy as np
import torch


def derived_seed(purpose: str, seed: int, *place: int) -> int:
    """A 64-bit seed: the first 8 bytes of BLAKE2b over the numbers, personalised by `purpose`.

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


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators, those of all devices included.

    Args:
        seed: 64 bits. NumPy's legacy generator takes them as two words.
    """
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # what users' code draws from
    torch.manual_seed(seed)
