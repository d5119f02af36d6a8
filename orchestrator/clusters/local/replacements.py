"""Which lost ranks of a local run get another process, and when (`run.max_replacements`).

The newcomer asks those that go on to let it in (`lifecycle/survival/asking.py`). None is started
where nobody would let it in: at the run's end, or when nobody that trains is left.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from orchestrator.clusters.request import Request
from orchestrator.config.schema import RunConfig
from orchestrator.lifecycle.survival.members import member_of
from orchestrator.lifecycle.survival.record import GenerationRecord
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import read_progress

USUAL = 16
"""How many there are where nobody says."""
REST_S = 0.5
"""From a rank's end to its next process: the others agree on the loss meanwhile."""
MOST_IN_VAIN = 2
"""So many processes of a rank in a row may end before they have done an update with the others."""


def most_of(run: RunConfig) -> int:
    """How many there may be, where ranks survive."""
    return USUAL if run.max_replacements is None else run.max_replacements


class Replacements:
    """Of one attempt.

    Attributes:
        left: so many processes may be started yet.
        over: there are to be no more, since the run comes to its end.
    """

    def __init__(
        self, run: RunDir, request: Request, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run, self._attempt, self._clock = run, request.attempt, clock
        self._ranks = request.nodes * request.ranks_per_node
        self._record = GenerationRecord(run.attempt(request.attempt))
        self.left = self._most = int(request.details["replacements"])
        self.over = False
        self._latest: Counter[int] = Counter()  # the number of each rank's newest process
        self._in_vain: Counter[int] = Counter()
        self._due: dict[int, float] = {}

    def member(self, rank: int) -> int:
        """The number of its newest process among the members."""
        return member_of(rank, self._latest[rank], self._ranks)

    def lost(self, rank: int) -> str:
        """Its process is gone, and the others go on. The next one is due soon; else why not, where
        a person would expect it.
        """
        self._in_vain[rank] = self._in_vain[rank] + 1 if self._was_in_vain(rank) else 0
        if self.over or not self._most:
            return ""
        if self.left <= len(self._due):
            return f"it is not started again: run.max_replacements={self._most} were started"
        if self._in_vain[rank] >= MOST_IN_VAIN:
            return f"it is not started again: its last {MOST_IN_VAIN} processes did no update"
        self._due[rank] = self._clock() + REST_S
        return ""

    def _was_in_vain(self, rank: int) -> bool:
        """Whether this process, one of those that were started later, has done no update."""
        if not self._latest[rank]:
            return False
        member = self.member(rank)
        let_in = [found["updates"] for found in self._record.since() if member in _joined(found)]
        place = read_progress(self._run.progress(self._attempt))
        return not let_in or place is None or place.update <= let_in[0]

    def due(self) -> list[tuple[int, int]]:
        """Ranks to be started now, each with the number of its process."""
        now = self._clock()
        if self.over:
            return []
        ready = sorted(rank for rank, at in self._due.items() if now >= at)
        for rank in ready:
            del self._due[rank]
            self._latest[rank] += 1
        self.left -= len(ready)
        return [(rank, self._latest[rank]) for rank in ready]

    @property
    def wait_s(self) -> float | None:
        """Until the next one is due; None: there is none."""
        if not self._due or self.over:
            return None
        return max(0.0, min(self._due.values()) - self._clock())

    def let_in(self, rank: int) -> bool:
        """Whether its newest process is, or was, one of those that train: the first one is."""
        return not self._latest[rank] or any(
            self.member(rank) in found["members"] for found in self._record.since(0)
        )

    def training(self, living: set[int]) -> set[int]:
        """Those of these ranks whose processes are in the newest generation: neither newcomers that
        wait, nor whom the others gave up. All, before there is one.
        """
        newest = self._record.newest()
        if newest is None:
            return set(living)
        return {rank for rank in living if self.member(rank) in newest["members"]}

    def stop(self) -> None:
        """There are to be no more."""
        self.over = True
        self._due.clear()


def _joined(found: dict[str, object]) -> set[int]:
    joined = found.get("joined", {})
    return {int(member) for member in joined} if isinstance(joined, dict) else set()
