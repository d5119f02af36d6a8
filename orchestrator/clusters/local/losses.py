"""Ranks and nodes of a local run that are gone while the others go on (surviving.md)."""

from __future__ import annotations

from orchestrator.clusters.request import Request
from orchestrator.clusters.root_cause import TAKEN_AWAY, End
from orchestrator.lifecycle.signs.node_watch import FENCED
from orchestrator.lifecycle.survival.record import GenerationRecord, to_blame
from orchestrator.rundir.folder import RunDir


class Losses:
    """Of one attempt.

    Attributes:
        ranks: those that are gone.
    """

    def __init__(self, run: RunDir, request: Request) -> None:
        self._asked = bool(request.details["survive"])
        self._record = GenerationRecord(run.attempt(request.attempt))
        self._ends: list[tuple[End, list[int]]] = []  # with the numbers of the members
        self.ranks: set[int] = set()

    @property
    def survived(self) -> bool:
        """Whether the others go on when a rank is gone: they have begun to train."""
        return self._asked and self._record.begun

    def take(self, end: End, members: dict[int, int], word: str) -> bool:
        """Whether this end is one that the others survive.

        Args:
            members: the number of each rank's process (`lifecycle/survival/members.py`).
        """
        if word != FENCED and (word or -end.status not in TAKEN_AWAY or not self.survived):
            return False
        self._ends.append((end, list(members.values())))
        self.ranks.update(members)
        return True

    @property
    def blamed(self) -> list[End]:
        """The ends that the attempt's own can be due to."""
        found = to_blame(self._ends, lambda one: one[1], self._record.losses())
        return [end for end, _ in found]
