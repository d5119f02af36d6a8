"""The record of generations: files in the attempt's folder, each created exactly once.

| in a file | what |
|---|---|
| `generation`, `members` | its number, and its members in order (`member_of`) |
| `gone`, `why` | lost members, and a description of how they were lost (`bounded_reasons`) |
| `hung` | members so far whose own code hung, which is survived once for each rank |
| `joined` | newcomers |
| `updates` | with newcomers: updates completed when they joined |
| `code` | in the first one: the ranks' own modules (`trainer/survival.py`) |

`link` either creates the name with all its content, or finds that it exists. That is the whole
consensus: a later proposal adopts the existing record. It holds on NFS too (unlike old O_EXCL).
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.rundir.files import create_once, read_json, to_json_text, write_atomically

End = TypeVar("End")


def candidate_causes(
    ends: Sequence[tuple[End, list[int]]], survived: Sequence[list[int]]
) -> list[End]:
    """Return the abnormal ends, each with its members, that may have ended the attempt: those that
    were not survived, or the last ones if all were. One survived twice is never a cause.

    >>> candidate_causes([("a", [5]), ("b", [3]), ("c", [4])], [[5], [3]])
    ['c']
    >>> candidate_causes([("a", [5]), ("b", [3])], [[5], [3]])
    ['b']
    >>> candidate_causes([("a", [5])], [[5], [3]])
    []
    """
    earlier = {member for gone in survived for member in gone}
    last = set(survived[-1]) if survived else set[int]()
    alone = [end for end, members in ends if not earlier.issuperset(members)]
    return alone or [end for end, members in ends if last.intersection(members)]


MOST_REASONS = 16
MOST_OF_REASON = 300  # characters
_LARGE = 10**15  # as long as any number of a generation or of updates


def bounded_reasons(why: Sequence[str]) -> list[str]:
    """Return the beginnings of the first reasons: of a whole rack there may be thousands.

    >>> bounded_reasons([f"on node{number}: lost" for number in range(20)])[15:]
    ['on node15: lost', 'and 4 more']
    """
    reasons = [
        reason if len(reason) <= MOST_OF_REASON else reason[: MOST_OF_REASON - 1] + "…"
        for reason in why[:MOST_REASONS]
    ]
    more = len(why) - len(reasons)
    return [*reasons, f"and {more} more"] if more else reasons


def message_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what workers need to know of a generation. It goes to every node and rank, so its size
    must not grow with their number: members are runs, and `publish` has bounded the reasons.

    >>> message_of({"generation": 1, "members": [0, 1, 2, 5, 6, 11], "why": ["on node1: lost"]})
    {'generation': 1, 'members': [[0, 2], [5, 6], [11, 11]], 'why': ['on node1: lost']}
    """
    runs: list[list[int]] = []
    for member in record["members"]:
        if runs and member == runs[-1][1] + 1:
            runs[-1][1] = member
        else:
            runs.append([member, member])
    return {"generation": record["generation"], "members": runs, "why": [*record.get("why", [])]}


def members_of(message: Mapping[str, Any]) -> list[int]:
    """Return the members that a message of `message_of` names, in order.

    >>> members_of({"members": [[0, 2], [5, 6], [11, 11]]})
    [0, 1, 2, 5, 6, 11]
    """
    return [member for first, last in message["members"] for member in range(first, last + 1)]


class GenerationRecord:
    """Members of each generation of an attempt, in the attempt's folder, which every rank sees."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, generation: int) -> Path:
        return self._folder / f"generation-{generation:04d}.json"

    def publish(
        self, generation: int, members: Iterable[int], *, why: Sequence[str] = (), **more: Any
    ) -> dict[str, Any]:
        """Propose `members`; return the accepted record: this proposal or an earlier one.

        Args:
            why: how members were lost; `bounded_reasons` keeps some of it.
            more: see the module.

        Raises:
            OSError: it cannot be written; a retry may succeed.
        """
        path = self.path(generation)
        reasons = {"why": bounded_reasons(why)} if why else {}
        content = {"generation": generation, "members": list(members), **reasons, **more}
        if create_once(path, to_json_text(path.name, content)):
            return content
        winner = self.read(generation)
        if winner is None:
            raise FileExistsError(path)
        return winner

    def has_room(self, members: Sequence[int]) -> bool:
        """Return whether a generation that lets some of these members in could be written now; only
        a write can detect a quota.
        """
        own = self._folder / f".room.{secrets.token_hex(8)}"
        largest: dict[str, Any] = {  # in which all are new, though the code of each has hung
            "generation": _LARGE,
            "members": list(members),
            "joined": {str(member): [] for member in members},
            "updates": _LARGE,
            "hung": list(members),
            "time": time.time(),
        }
        try:
            write_atomically(own, to_json_text(own.name, largest))
        except OSError:
            return False
        own.unlink()
        return True

    def read(self, generation: int) -> dict[str, Any] | None:
        """Return the record of a generation; None before there is one."""
        return read_json(self.path(generation))

    def since(self, generation: int = 1) -> Iterator[dict[str, Any]]:
        """Return all generations from this one on, in order."""
        while (record := self.read(generation)) is not None:
            yield record
            generation += 1

    def losses(self) -> list[list[int]]:
        """Return the lost members of each generation that lost some, the oldest first."""
        return [record["gone"] for record in self.since() if record.get("gone")]

    def newest(self) -> dict[str, Any] | None:
        """Return the newest generation; None before the first."""
        return next(iter(deque(self.since(0), maxlen=1)), None)


# ----------------------------------------------------------------------
# Members: the processes of an attempt, each with a unique number.
#
# The first process of rank r is member r; its k-th replacement is member r + k * ranks. So an
# evicted process stays out, whatever has replaced it since.
#
# A list of members is in the order in which they joined. The first one leads: the others follow it,
# and its process is rank 0 of their group. So the leader was a member before, and knows the run's
# progress; a newcomer is last, however low its number.
#


def member_of(rank: int, incarnation: int, ranks: int) -> int:
    """Return the member's number; the incarnation counts from 0.

    >>> member_of(2, 0, 4), member_of(2, 1, 4), member_of(2, 2, 4)
    (2, 6, 10)
    """
    return rank + incarnation * ranks


def rank_of(member: int, ranks: int) -> int:
    """Return the member's rank.

    >>> rank_of(6, 4), rank_of(3, 4)
    (2, 3)
    """
    return member % ranks


def incarnation_of(member: int, ranks: int) -> int:
    """Return which incarnation of its rank the member is, counted from 0.

    >>> incarnation_of(6, 4), incarnation_of(3, 4)
    (1, 0)
    """
    return member // ranks
