"""Seeds as pure functions of the run's seed and of a place in the data. No framework is
imported.
"""

from __future__ import annotations

import hashlib
import struct


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
