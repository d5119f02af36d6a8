"""Membership: the members of the newest generation, those lost since, and those whose code hung.

A member is one process of a rank; `rundir/generations.py` has its number and the record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.agent.worker_state import WorkerState
from orchestrator.rundir.generations import member_of, message_of, rank_of


class Membership:
    """Members of one attempt, by its recorded generations.

    Args:
        generations: those recorded so far, in order.

    Attributes:
        generation: number of the newest; -1 before the first.
        current: the newest one's members, in the order in which they joined; of all ranks before
            the first.
        message: the newest generation, as workers get it; empty before the first.
        lost: members lost since.
        noticed_at: when the newest of these losses was noticed.
        hung: members so far, of any generation, whose own code has hung.
    """

    def __init__(self, ranks: int, generations: Iterable[Mapping[str, Any]]) -> None:
        self._ranks = ranks
        self.generation, self.current = -1, list(range(ranks))
        self.message: dict[str, Any] = {}
        self.lost, self.hung = set[int](), set[int]()
        self.noticed_at = 0.0
        self._numbers = set(self.current)
        for generation in generations:
            self.adopt(generation, 0.0)

    def adopt(self, generation: Mapping[str, Any], now: float) -> None:
        """Adopt a recorded generation."""
        self.message = message_of(generation)
        self.generation, self.current = generation["generation"], list(generation["members"])
        self._numbers = set(self.current)
        self.hung.update(generation.get("hung", ()))
        self.lost &= self._numbers
        self.noticed_at = now if self.lost else 0.0

    def lose(self, members: set[int], now: float) -> bool:
        """Count members as lost; return whether one of them was not yet."""
        if members <= self.lost:
            return False
        self.lost |= members
        self.noticed_at = now
        return True

    def keep(self, members: set[int]) -> None:
        """Count lost members as lost no more: they live, and were only out of reach."""
        self.lost -= members

    @property
    def remaining(self) -> list[int]:
        return [member for member in self.current if member not in self.lost]

    def number_of(self, worker: WorkerState) -> int:
        """Return the number that this process of its rank has as a member."""
        return member_of(worker.rank, worker.incarnation, self._ranks)

    def among(self, members: Iterable[int]) -> set[int]:
        """Return which of these are members of the newest generation."""
        return self._numbers.intersection(members)

    def includes(self, worker: WorkerState) -> bool:
        """Return whether this process is a member that has not ended."""
        return worker.state != "ended" and self.number_of(worker) in self._numbers

    def has_hung_before(self, worker: WorkerState) -> bool:
        """Return whether the code of another process of this rank hung, as a member."""
        others = self.hung - {self.number_of(worker)}
        return any(rank_of(member, self._ranks) == worker.rank for member in others)
