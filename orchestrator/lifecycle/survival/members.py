"""Members: the processes of an attempt, each with a number that no other one ever has.

The first process of rank r is member r; the k-th that takes its place is member r + k * ranks. So
whoever was given up stays out, whatever has come in its place since.

A list of members is in the order in which they came. The first one leads: the others follow it, and
its process is rank 0 of their group. So whoever leads has been there before, and knows what was
done; a newcomer is last, however low its number.
"""

from __future__ import annotations


def member_of(rank: int, process: int, ranks: int) -> int:
    """The number of a rank's `process`-th process, counted from 0.

    >>> member_of(2, 0, 4), member_of(2, 1, 4), member_of(2, 2, 4)
    (2, 6, 10)
    """
    return rank + process * ranks


def rank_of(member: int, ranks: int) -> int:
    """Whose place it has.

    >>> rank_of(6, 4), rank_of(3, 4)
    (2, 3)
    """
    return member % ranks


def process_of(member: int, ranks: int) -> int:
    """Which of its rank's processes it is.

    >>> process_of(6, 4), process_of(3, 4)
    (1, 0)
    """
    return member // ranks
