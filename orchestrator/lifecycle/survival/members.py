"""Members: the processes of an attempt, each with a unique number.

The first process of rank r is member r; its k-th replacement is member r + k * ranks. So an evicted
process stays out, whatever has replaced it since.

A list of members is in the order in which they joined. The first one leads: the others follow it,
and its process is rank 0 of their group. So the leader was a member before, and knows the run's
progress; a newcomer is last, however low its number.
"""

from __future__ import annotations


def member_of(rank: int, process: int, ranks: int) -> int:
    """Return the number of a rank's `process`-th process, counted from 0.

    >>> member_of(2, 0, 4), member_of(2, 1, 4), member_of(2, 2, 4)
    (2, 6, 10)
    """
    return rank + process * ranks


def rank_of(member: int, ranks: int) -> int:
    """Return the member's rank.

    >>> rank_of(6, 4), rank_of(3, 4)
    (2, 3)
    """
    return member % ranks


def process_of(member: int, ranks: int) -> int:
    """Return which of its rank's processes the member is, counted from 0.

    >>> process_of(6, 4), process_of(3, 4)
    (1, 0)
    """
    return member // ranks
