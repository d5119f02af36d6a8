"""The search itself: a new trial is drawn when one has ended, not when all have.

What it knows is in its journal and in the trials' folders. The journal has a trial before its
folder is begun, and its value after its run has ended; so it may be killed anywhere, and the next
start finds each trial as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import ConfigError, RunFailed, UsageError
from orchestrator.outcome.run_result import write_end
from orchestrator.outcome.run_state import State
from orchestrator.plan.plan_warnings import named_numbers
from orchestrator.report.tables.search_table import words_of
from orchestrator.report.terminal import say
from orchestrator.runs.console import Manner
from orchestrator.sweeps.content import made_of
from orchestrator.sweeps.local.queue import PointEnded
from orchestrator.sweeps.points import Point
from orchestrator.sweeps.returns import NoSuchFigure, measured
from orchestrator.sweeps.search.asked import Asked
from orchestrator.sweeps.search.drawing import distributions, draw
from orchestrator.sweeps.search.found import why_no_value, write_table
from orchestrator.sweeps.search.journal import SAME_AS, Journal
from orchestrator.sweeps.search.places import Place
from orchestrator.sweeps.search.pruning import Pruner, Watched
from orchestrator.sweeps.todo import Cell, Do, cells_of

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

# What was drawn; its cell, or why there can be none; or the earlier trial that is the same point.
Next = tuple[dict[str, Any], Cell | str | None, int | None]
RUNNING, COMPLETE, PRUNED = "RUNNING", "COMPLETE", "PRUNED"


@dataclass(kw_only=True, slots=True)
class Trial:
    """One that has not been told yet, or that is about to stop."""

    number: int
    cell: Cell
    watched: Watched
    over: bool = False  # its state is final; its run is only to end
    stopping: bool = False  # it was told to, with an earlier start: it goes on once it has


class Searcher:
    """One start of a search."""

    def __init__(self, asked: Asked, journal: Journal, place: Place, manner: Manner) -> None:
        self._asked, self._journal, self._place, self._manner = asked, journal, place, manner
        self._pruner = Pruner(journal, asked.sweep.prune)
        self._running: dict[Path, Trial] = {}
        self._waiting: list[Trial] = []
        self._folders: dict[int, Path] = {}
        self._next: Next | None = None  # chosen by all that is known now, but not begun
        self.table: dict[str, Any] = {}

    def run(self) -> None:
        """To the end of the last trial, or to an interrupt.

        Raises:
            ConfigError: what an earlier start has left is of other code, or no trial so far has
                measured the objective.
        """
        self._find_again()
        self._show()
        while True:
            if not self._place.interrupts.count:
                self._start_waiting()
                self._draw_more()
            if not self._place.running:
                break
            for ended in self._place.wait():
                self._ended(ended)
            self._judge()

    # What an earlier start has left.

    def _find_again(self) -> None:
        trials = [t for t in self._journal.trials if SAME_AS not in t.user_attrs]
        found = {t.number: point for t in trials if (point := self._point_of(t)) is not None}
        cells = dict(zip(found, cells_of(list(found.values())), strict=True)) if found else {}
        self._folders = {n: cell.run.path for n, cell in cells.items() if cell.run.config.exists()}
        self._refuse_changed([t for t in trials if t.number in cells], cells)
        for trial in trials:
            cell = cells.get(trial.number)
            if cell is not None and trial.state.name == PRUNED:
                self._end_pruned(trial, cell)
            elif cell is not None and trial.state.name == RUNNING:
                self._go_on(trial, cell)
        self._tell_twins()

    def _point_of(self, trial: FrozenTrial) -> Point | None:
        try:
            return self._asked.point(trial.number, trial.params)
        except UsageError as error:
            if trial.state.name == RUNNING:  # killed before it could say so
                self._journal.fail(trial.number, str(error))
            return None

    def _refuse_changed(self, trials: Sequence[FrozenTrial], cells: Mapping[int, Cell]) -> None:
        """What has a value, or may get one, has to be of one code, and of the same data."""
        changed = {
            t.number: cells[t.number].why
            for t in trials
            if t.state.name in (RUNNING, COMPLETE, PRUNED)
            and cells[t.number].why.startswith("changed")
        }
        if changed:
            raise ConfigError(
                f"{named_numbers('trial', sorted(changed))} of {self._asked.folder} cannot be "
                f"compared with what would run now ({next(iter(changed.values()))}); choose "
                f"another run.dir, or begin the search anew with --force"
            )

    def _go_on(self, trial: FrozenTrial, cell: Cell) -> None:
        found = self._trial(trial.number, cell, max(trial.intermediate_values, default=-1))
        if cell.do is Do.WAIT:
            found.stopping = cell.run.cancel.exists()
            self._running[cell.run.path] = found
            self._place.follow(cell)
        elif cell.do is Do.NOTHING or cell.why == "failed":
            self._tell(found, None)
        else:
            self._waiting.append(found)

    def _end_pruned(self, trial: FrozenTrial, cell: Cell) -> None:
        """Its end may not have come to its run yet."""
        if cell.do is Do.WAIT:
            self._running[cell.run.path] = self._trial(trial.number, cell)
            self._running[cell.run.path].over = True
            self._place.follow(cell)
            self._stop(cell, trial.user_attrs.get("why", ""))
        elif cell.why == "lost":
            self._note_pruned(cell, trial.user_attrs.get("why", ""))
            write_end(cell.run, State.STOPPED)

    # Trials begin.

    def _start_waiting(self) -> None:
        while self._waiting and self._place.has_room(self._waiting[0].cell):
            if not self._start(self._waiting.pop(0)):
                return

    def _start(self, trial: Trial) -> bool:
        """False where it has to wait: what was free a moment ago is not any more."""
        self._folders[trial.number] = trial.cell.run.path
        self._running[trial.cell.run.path] = trial
        try:
            started = self._place.start(trial.cell)
        except ConfigError as error:
            self._forget(trial)
            self._tell(trial, str(error))
            return True
        if not started:
            self._forget(trial)
            self._waiting.insert(0, trial)
        elif not self._manner.quiet:
            chosen = trial.cell.point.overrides[len(self._asked.space.fixed) :]
            say(self._manner.console, f"trial {trial.number} begins: {' '.join(chosen)}", "dim")
        return started

    def _forget(self, trial: Trial) -> None:
        """It does not run; it has a folder only if an earlier start has begun it."""
        del self._running[trial.cell.run.path]
        if not trial.cell.run.config.exists():
            del self._folders[trial.number]

    def _draw_more(self) -> None:
        while not self._waiting and len(self._journal.trials) < self._asked.trials:
            self._next = self._next or self._choose(self._journal.trials)
            drawn, cell, same_as = self._next
            if isinstance(cell, Cell) and not self._place.has_room(cell):
                return
            self._next = None
            number = self._journal.begin(drawn, distributions(self._asked.space), same_as)
            if isinstance(cell, Cell):
                self._begin(number, cell)
            elif cell is not None:
                self._journal.fail(number, cell)
                self._told(number)
            self._tell_twins()
            self._show()

    def _begin(self, number: int, cell: Cell) -> None:
        """A new trial. One of this very point may be there, if the journal has lost its end."""
        if cell.do is Do.BEGIN:
            self._start(self._trial(number, cell))
            return
        self._folders[number] = cell.run.path
        self._go_on(self._journal.trial(number), cell)
        self._start_waiting()

    def _choose(self, trials: Sequence[FrozenTrial]) -> Next:
        space = self._asked.space
        drawn = draw(space, self._asked.sweep, trials)
        for earlier in trials:
            if space.overrides(earlier.params) == space.overrides(drawn):
                return drawn, None, earlier.user_attrs.get(SAME_AS, earlier.number)
        return drawn, self._cell(len(trials), drawn), None

    def _cell(self, number: int, drawn: Mapping[str, Any]) -> Cell | str:
        """Why there can be none, where it is so."""
        try:
            point = self._asked.point(number, drawn)
            if point.folder.exists():
                return cells_of([point])[0]
            made = made_of(point.config, point.of)
            return Cell(point=point, do=Do.BEGIN, why="new", made_of=made)
        except UsageError as error:
            return str(error)

    # Trials end.

    def _judge(self) -> None:
        for trial in self._running.values():
            if trial.over or not (why := self._pruner.judge(trial.number, trial.watched)):
                continue
            self._journal.prune(trial.number, why)
            trial.over = True
            self._stop(trial.cell, why)
            self._told(trial.number)

    def _stop(self, cell: Cell, why: str) -> None:
        self._note_pruned(cell, why)
        self._place.stop(cell)

    def _note_pruned(self, cell: Cell, why: str) -> None:
        cell.run.write_own(cell.run.pruned, {"why": why})

    def _ended(self, ended: PointEnded) -> None:
        trial = self._running.pop(ended.cell.run.path)
        if trial.over:
            return
        result = None if ended.refusal else trial.cell.run.read_result()
        finished = result is not None and result["state"] == "finished"
        if self._place.interrupts.count and not finished:
            return  # it goes on with the next start
        [cell] = cells_of([trial.cell.point]) if trial.stopping else [trial.cell]
        if trial.stopping and cell.why in (State.STOPPED.value, "lost"):
            self._go_on(self._journal.trial(trial.number), cell)
        else:
            self._tell(trial, ended.refusal)

    def _tell(self, trial: Trial, refusal: str | None) -> None:
        """Write down what a trial came to, once its run is over."""
        try:
            why = refusal or why_no_value(trial.cell)
            value = None if why else measured(trial.cell.run, self._asked.sweep.objective)
        except RunFailed as error:
            why, value = str(error), None
            if isinstance(error, NoSuchFigure) and not self._journal.has_value:
                self._journal.fail(trial.number, why)
                self._show()
                more = "if other trials will, the same line goes on with them"
                raise ConfigError(f"{why}; {more}") from error
        if value is None:
            self._journal.fail(trial.number, why)
        else:
            self._pruner.complete(trial.number, trial.watched)
            self._journal.complete(trial.number, value)
        self._told(trial.number)

    def _told(self, number: int) -> None:
        self._next = None
        self._tell_twins()
        self._show()
        if not self._manner.quiet:
            say(self._manner.console, words_of(self.table, number))

    def _tell_twins(self) -> None:
        """A point that is drawn again is not computed again."""
        for trial in self._journal.trials:
            same_as = trial.user_attrs.get(SAME_AS)
            if same_as is None or trial.state.name != RUNNING:
                continue
            first = self._journal.trial(same_as)
            if first.state.name == COMPLETE:
                self._journal.complete(trial.number, first.value or 0.0)
            elif first.state.name == PRUNED:
                self._journal.prune(trial.number, first.user_attrs.get("why", ""))
            elif first.state.name != RUNNING:
                self._journal.fail(trial.number, first.user_attrs.get("why", ""))

    # What people see.

    def _trial(self, number: int, cell: Cell, since: int = -1) -> Trial:
        watched = Watched(cell.run, self._asked.sweep.objective, since)
        return Trial(number=number, cell=cell, watched=watched)

    def _show(self) -> None:
        self.table = write_table(self._asked, self._journal, self._folders)
