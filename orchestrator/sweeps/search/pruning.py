"""Is a trial worth going on with? Judged by its objective, as its run writes it down."""

from __future__ import annotations

import math
from collections.abc import Iterator

from orchestrator.report.metrics import Tail
from orchestrator.run_folder.rundir import RunDir
from orchestrator.sweeps.search.journal import Journal


class Watched:
    """The objective of one trial while it runs.

    Args:
        since: the update that was told last, by an earlier start of the search; -1 for none.
    """

    def __init__(self, run: RunDir, objective: str, since: int = -1) -> None:
        self._tail, self._objective, self._told = Tail(run.metrics), objective, since

    def new(self) -> Iterator[tuple[int, float]]:
        """(update, objective) of what was written since; an update that is redone counts once."""
        for record in self._tail.read():
            update = record.get("update", -1)
            figures = record if self._objective == "loss" else record.get("evaluation") or {}
            value = figures.get(self._objective)
            if not isinstance(value, int | float) or not math.isfinite(value):
                continue
            if update > self._told and is_told(update + 1):
                self._told = update
                yield update, float(value)


def is_told(updates: int) -> bool:
    """Whether a trial is judged after so many updates: those of two digits, and zeros behind. So
    any two trials are judged after the same ones, and a long one no more than 90 times a decade.

    >>> [n for n in (7, 99, 101, 110, 1010, 1100) if is_told(n)]
    [7, 99, 110, 1100]
    """
    return updates % 10 ** max(0, len(str(updates)) - 2) == 0


class Pruner:
    """Rules on trials. Those that end early count as worse than what they were compared with."""

    def __init__(self, journal: Journal, name: str) -> None:
        from optuna.pruners import MedianPruner

        self._journal = journal
        self._pruner = MedianPruner() if name == "median" else None

    def judge(self, number: int, watched: Watched) -> str | None:
        """Write down what is new of a trial; why it is to end now, if it is."""
        for update, value in self._new(watched):
            self._journal.report(number, update, value)
            trial = self._journal.trial(number)
            if self._pruner and self._pruner.prune(self._journal.study, trial):
                return f"worse after update {update + 1} than the median of those before it"
        return None

    def complete(self, number: int, watched: Watched) -> None:
        """Write down the rest of a trial that has finished, for others to be compared with."""
        for update, value in self._new(watched):
            self._journal.report(number, update, value)

    def _new(self, watched: Watched) -> Iterator[tuple[int, float]]:
        return watched.new() if self._pruner else iter(())
