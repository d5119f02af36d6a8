"""A run's live line: what is new in its folder, whenever somebody looks."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from orchestrator.report.progress import Progress
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import Tail, read_progress
from orchestrator.rundir.warnings import NewWarnings
from orchestrator.runs.console import Manner


class Showing:
    """The line of a run, while it is entered.

    Args:
        recent: of what was written before, so many bytes are shown, too.
    """

    def __init__(self, run: RunDir, manner: Manner, *, recent: int = 0) -> None:
        self._run = run
        self._tail = Tail(run.metrics)
        self._tail.skip_to_the_end(recent)
        self.plan = run.read_plan()
        self._attempt, self._warned = -1, NewWarnings(run.path)
        if isinstance(run.read_config()["cluster"]["nodes"], dict):
            self.plan.pop("ranks")  # of the most nodes; a scheduler may give fewer
        self._line = Progress(self.plan, manner.console, manner.quiet, manner.verbose)

    def __enter__(self) -> Self:
        self._line.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._line.__exit__(kind, error, trace)

    def look(self, *, ended: bool) -> None:
        """Show what is new; all of it once the run has ended."""
        attempt = max(0, self._run.attempts_made() - 1)
        if attempt != self._attempt:
            self._attempt = attempt
            already = self.plan.get("warnings") or ()
            self._warned = NewWarnings(self._run.attempt(attempt), already=already)
        place = read_progress(self._run.progress(attempt))
        records = [*self._tail.read(), *(self._tail.rest() if ended else ())]
        if records and self.plan.get("dataset_samples") is None:
            # by now the workers know the data set, and so the length
            self.plan.update(self._run.read_plan())
        micro_steps = (place.done, place.steps) if place else None
        self._line.update(records, micro_steps, self._warned.read(now=ended))
