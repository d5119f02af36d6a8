"""The fixed binary tree over an update's leaves, and who holds which part of it. Pure integers.

The tree over leaves lo..hi-1 splits at the largest power of two below its length. So its nodes are
the ranges [k 2^j, min((k+1) 2^j, L)), and any contiguous range of leaves is made of at most 2 log2
L of them. The order of additions is the tree's, and thus the same whoever owns which leaves.
"""

from __future__ import annotations

from collections.abc import Sequence

Range = tuple[int, int]
"""Leaves first..last-1, as (first, last)."""


def middle(lo: int, hi: int) -> int:
    """Where the node over leaves lo..hi-1 splits.

    >>> middle(0, 10), middle(8, 10), middle(0, 8)
    (8, 9, 4)
    """
    return lo + (1 << ((hi - lo - 1).bit_length() - 1))


def are_siblings(left: Range, right: Range, leaves: int) -> bool:
    """Whether two adjacent nodes are the children of one node of the tree over `leaves` leaves.

    >>> are_siblings((0, 8), (8, 10), leaves=10), are_siblings((0, 8), (8, 9), leaves=10)
    (True, False)
    """
    size = left[1] - left[0]
    return (
        left[1] == right[0]
        and size.bit_count() == 1
        and left[0] % (2 * size) == 0
        and right[1] == min(left[0] + 2 * size, leaves)
    )


def nodes_of(owned: Range, leaves: int) -> list[Range]:
    """The fewest nodes of the tree that make up the range `owned`, from left to right.

    >>> nodes_of((1, 9), leaves=10)
    [(1, 2), (2, 4), (4, 8), (8, 9)]
    >>> nodes_of((0, 10), leaves=10)
    [(0, 10)]
    """

    def within(lo: int, hi: int) -> list[Range]:
        if owned[0] <= lo and hi <= owned[1]:
            return [(lo, hi)]
        if hi <= owned[0] or owned[1] <= lo:
            return []
        split = middle(lo, hi)
        return within(lo, split) + within(split, hi)

    return within(0, leaves) if owned[0] < owned[1] else []


def gap_in(owned: Sequence[Range], leaves: int) -> str:
    """What is wrong with ranks' ranges that should cover every leaf once; "" when nothing is.

    >>> gap_in([(0, 4), (0, 0), (4, 10)], leaves=10)
    ''
    >>> gap_in([(0, 4), (5, 10)], leaves=10)
    'leaf 4 belongs to no rank'
    """
    reached = 0
    for first, last in sorted(piece for piece in owned if piece[0] < piece[1]):
        if first > reached:
            return f"leaf {reached} belongs to no rank"
        if first < reached:
            return f"leaf {first} belongs to two ranks"
        reached = last
    return "" if reached == leaves else f"leaf {min(reached, leaves)} belongs to no rank"
