"""Which lost workers are restarted, and when (`run.max_replacements`).

The new process asks the training workers to join at a boundary. None is started where none could
admit it: at the run's end, or when no worker still trains.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from orchestrator.agent.generations import GenerationRecord, member_of
from orchestrator.agent.node_spec import NodeSpec
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import read_progress

REST_S = 0.5
"""From a worker's end to its next process: the others agree on the loss meanwhile."""
MOST_IN_VAIN = 2
"""So many processes of a rank in a row may end before they have done an update with the others."""


class Replacements:
    """Restarts of one attempt's workers."""

    def __init__(
        self,
        run: RunDir,
        spec: NodeSpec,
        record: GenerationRecord,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._spec, self._record, self._clock = run, spec, record, clock
        self._left = spec.replacements
        self._over = False
        self._latest: Counter[int] = Counter()  # the number of each rank's newest process
        self._in_vain: Counter[int] = Counter()
        self._due: dict[int, float] = {}

    def know(self, rank: int, process: int) -> None:
        """Record that `rank` has, or had, a process of that number."""
        self._latest[rank] = max(self._latest[rank], process)

    def lost(self, rank: int) -> str:
        """Schedule a lost rank's next process; return why none is started, if unexpected."""
        self._in_vain[rank] = self._in_vain[rank] + 1 if self._was_in_vain(rank) else 0
        if self._over or not self._spec.replacements:
            return ""
        if self._left <= len(self._due):
            most = self._spec.replacements
            return f"it is not started again: run.max_replacements={most} were started"
        if self._in_vain[rank] >= MOST_IN_VAIN:
            return f"it is not started again: its last {MOST_IN_VAIN} processes did no update"
        self._due[rank] = self._clock() + REST_S
        return ""

    def _was_in_vain(self, rank: int) -> bool:
        """Return whether this replacement process has completed no update."""
        if not self._latest[rank]:
            return False
        member = str(member_of(rank, self._latest[rank], self._spec.ranks))
        let_in = [
            found["updates"] for found in self._record.since() if member in found.get("joined", {})
        ]
        place = read_progress(self._run.progress(self._spec.attempt))
        return not let_in or place is None or place.update <= let_in[0]

    def due(self, can_start: Callable[[int], bool]) -> list[tuple[int, int]]:
        """Return the ranks to be started now, each with the number of its process.

        Args:
            can_start: whether an agent can start a rank.
        """
        now = self._clock()
        ready = sorted(rank for rank, at in self._due.items() if now >= at and can_start(rank))
        for rank in ready:
            del self._due[rank]
            self._latest[rank] += 1
        self._left -= len(ready)
        return [(rank, self._latest[rank]) for rank in ready]

    @property
    def pending(self) -> bool:
        """Return whether a process will be started."""
        return bool(self._due)

    def stop(self) -> None:
        """Start no more processes."""
        self._over = True
        self._due.clear()
