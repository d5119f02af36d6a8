"""Who computes which leaf again, and which ranks computed wrongly: pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from orchestrator.engine.common.seeds import derived_seed

LIMBS = 4
"""Numbers of 16 bits that carry a digest of 64: any transport's floats hold them."""


def is_due(update: int, every: int) -> bool:
    """Return whether leaves of this update, counted from 0, are computed again.

    >>> [update for update in range(9) if is_due(update, every=3)]
    [2, 5, 8]
    """
    return (update + 1) % every == 0


def shift_of(update: int, every: int, ranks: int) -> int:
    """Return by how many ranks the one that checks a leaf is ahead of the one that has it. In turn
    each rank is checked by all others.

    >>> [shift_of(update, every=10, ranks=4) for update in (9, 19, 29, 39)]
    [1, 2, 3, 1]
    """
    return 1 + update // every % (ranks - 1)


def chosen_leaf(seed: int, update: int, rank: int, leaves: int) -> int | None:
    """Return the place, among the leaves of a rank, of the one that is computed again; None where
    it has none.
    """
    return derived_seed("sentinel", seed, update, rank) % leaves if leaves else None


def to_limbs(digest: int) -> list[float]:
    return [float(digest >> 16 * place & 0xFFFF) for place in range(LIMBS)]


def from_limbs(limbs: Sequence[float]) -> int:
    """Return the digest that `to_limbs` has split.

    >>> from_limbs(to_limbs(2**64 - 3)) == 2**64 - 3
    True
    """
    return sum(int(limb) << 16 * place for place, limb in enumerate(limbs))


def differing_owners(own: Sequence[int], checked: Sequence[int], shift: int) -> list[int]:
    """Return the ranks whose leaf had other bits where it was computed again.

    Args:
        own: by rank, the digest of its own leaf.
        checked: by rank, the digest of the leaf that it computed again.
        shift: see `shift_of`.

    >>> differing_owners([1, 2, 3], [3, 7, 2], shift=1)
    [0]
    """
    ranks = len(own)
    return [rank for rank in range(ranks) if own[rank] != checked[(rank + shift) % ranks]]


def wrong_ranks(
    owner: int, own: int, checker: int, checked: int, repeats: Sequence[int]
) -> list[int]:
    """Return the ranks that computed a leaf wrongly; [] if that cannot be decided.

    Args:
        owner, checker: the ranks that differ, with their digests `own` and `checked`.
        repeats: by rank, the digest of all ranks' computing it once more. What more than half of
            them have is right.

    >>> wrong_ranks(0, 5, 1, 8, repeats=[5, 8, 5])  # rank 1 errs always
    [1]
    >>> wrong_ranks(0, 5, 1, 8, repeats=[8, 8])  # rank 0 erred once
    [0]
    >>> wrong_ranks(0, 5, 1, 8, repeats=[5, 8])
    []
    """
    [(right, count)] = Counter(repeats).most_common(1)
    if 2 * count <= len(repeats):
        return []
    wrong = {rank for rank, digest in enumerate(repeats) if digest != right}
    wrong |= {rank for rank, digest in ((owner, own), (checker, checked)) if digest != right}
    return sorted(wrong)
