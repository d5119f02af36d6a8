"""Replacements of lost ranks: when the next process of each is due, and which ranks get none.

A new process asks the training workers to join at a boundary. None is started where none could
admit it: at the run's end, or when no worker still trains (`run.max_replacements`).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping

from orchestrator.agent.node_spec import NodeSpec
from orchestrator.agent.worker_state import WorkerState
from orchestrator.errors import RunFolderError
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.generations import GenerationRecord, member_of
from orchestrator.rundir.metrics import read_progress

log = logging.getLogger(__name__)

REST_S = 0.5
"""From a worker's end to its next process: the others agree on the loss meanwhile."""
MOST_FRUITLESS = 2
"""Consecutive processes of a rank that may end without an update together with the others."""


class Replacements:
    """The ranks of one attempt whose lost process is to be replaced."""

    def __init__(self, spec: NodeSpec, record: GenerationRecord) -> None:
        self._spec, self._record = spec, record
        self._due_at: dict[int, float] = {}  # by rank
        # A rank's processes in a row without an update, by rank. As sets, since an end may be
        # reported again.
        self._fruitless: defaultdict[int, set[int]] = defaultdict(set)
        self._excluded: set[int] = set()  # ranks that computed wrongly

    @property
    def ranks(self) -> list[int]:
        """Return the ranks whose next process is still to start."""
        return list(self._due_at)

    def exclude(self, rank: int) -> None:
        """Start no process of this rank again."""
        self._excluded.add(rank)

    def cancel(self, rank: int) -> None:
        """Start no further process of this rank: one has started."""
        self._due_at.pop(rank, None)

    def cancel_all(self) -> None:
        self._due_at.clear()

    def schedule(
        self, rank: int, workers: Mapping[int, WorkerState], now: float, *, over: bool
    ) -> str | None:
        """Schedule a lost rank's next process.

        Args:
            workers: all of the attempt, by rank.
            over: no generation follows, so none would be admitted.

        Returns:
            A warning, if none is started though it is expected.
        """
        worker = workers[rank]
        if worker.sleeps:
            return None  # an agent starts no second process of a rank
        if not worker.started:
            pass  # its agent was lost before it heard of it
        elif self._was_fruitless(worker):
            self._fruitless[rank].add(worker.incarnation)
        else:
            self._fruitless[rank].clear()
        most = self._spec.replacements
        if over or not most or self._excluded.intersection(self._spec.failure_unit(rank)):
            return None
        started = sum(worker.incarnation for worker in workers.values())  # by all coordinators
        # Those that are scheduled count, too: `started` has them only once they run.
        if most - started <= len(self._due_at):
            return f"it is not started again: run.max_replacements={most} were started"
        if len(self._fruitless[rank]) >= MOST_FRUITLESS:
            return f"it is not started again: its last {MOST_FRUITLESS} processes did no update"
        self._due_at[rank] = now + REST_S
        return None

    def _was_fruitless(self, worker: WorkerState) -> bool:
        """Return whether this replacement process has completed no update, as far as is known."""
        if not worker.incarnation:
            return False
        member = str(member_of(worker.rank, worker.incarnation, self._spec.ranks))
        try:
            joined_after = [
                generation["updates"]
                for generation in self._record.since()
                if member in generation.get("joined", {})
            ]
            progress = read_progress(RunDir(self._spec.run).progress(self._spec.attempt))
        except (OSError, RunFolderError) as error:
            log.warning("how far rank %d came is unknown: %s", worker.rank, error)
            return False
        return not joined_after or progress is None or progress.update <= joined_after[0]

    def due_units(self, now: float) -> list[tuple[int, ...]]:
        """Return the failure units of which all ranks are due: their members join together."""
        due = {rank for rank, at in self._due_at.items() if now >= at}
        units = dict.fromkeys(self._spec.failure_unit(rank) for rank in sorted(due))
        return [unit for unit in units if due.issuperset(unit)]
