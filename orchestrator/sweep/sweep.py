"""A sweep from its points to its table."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.cli.follow import OutputOptions
from orchestrator.cli.resume import (
    changed_inputs,
    refuse_changed,
    resumption,
    submission_directory,
)
from orchestrator.cli.start import config_of, prepare
from orchestrator.cli.status import statuses
from orchestrator.clusters.api import Culprit, class_for
from orchestrator.config.composer import Composer
from orchestrator.config.job_source import read_once
from orchestrator.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    ConfigError,
    RunFolderError,
)
from orchestrator.report.sweep_tables import (
    accumulation_pairs,
    only_varying,
    print_sweep,
    print_time_and_memory,
    swept_run,
    timed_concurrently,
)
from orchestrator.report.terminal import command, say
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.status import OVER, RunStatus
from orchestrator.sweep.cells import Action, Cell, cells_of, refuse_replacing
from orchestrator.sweep.points import Point, checked
from orchestrator.sweep.submission import alone_in, submit
from orchestrator.units import plural

if TYPE_CHECKING:
    from orchestrator.sweep.local import PointEnded


def require_optuna() -> None:
    """Raise `ConfigError` if optuna is missing."""
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError("a search needs optuna, which is not installed; pip install 'optuna>=4'")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)


def run_sweep(composer: Composer, output: OutputOptions) -> int:
    """Check all points, run what is to be run, and print their table; give the exit code.

    Raises:
        ConfigError: what is wrong with any point. Nothing has run then, and nothing was written.
    """
    if composer.searches:
        require_optuna()
        from orchestrator.sweep.search import run_search

        return run_search(composer, output)
    with contextlib.ExitStack() as open_until_the_end:
        sweep = Sweep(output, open_until_the_end)
        points = checked(composer.all_points())
        for folder in {point.folder.parent for point in points}:
            sweep.hold(folder)
        cells = cells_of(points, force=any(p.config.sweep.force for p in points))
        if not composer.line.changed:
            refuse_replacing(cells)
        sweep.place(cells)
        return sweep.finish()


class Sweep:
    """Places points and remembers how they ended. A failing point does not end the sweep."""

    def __init__(self, output: OutputOptions, stack: contextlib.ExitStack) -> None:
        self._output, self._stack = output, stack
        self.cells: Sequence[Cell] = ()
        self._codes: dict[Path, int] = {}
        self._refused: dict[Path, str] = {}
        self._queued: list[Path] = []
        self._stopped: int | None = None

    def place(self, cells: Sequence[Cell]) -> None:
        """Start or resume what needs it. Raises what refuses them, before any is started."""
        self._say(cells)
        self.cells = cells
        todo = [cell for cell in cells if cell.action in (Action.START, Action.RESUME)]
        alone = [c for c in todo if not class_for(c.point.config).attended]
        if alone:
            submit(alone, self._output)
        self._queued = [c.run.path for c in cells if c in alone or c.action is Action.WAIT]
        if here := [cell for cell in todo if cell not in alone]:
            self._run_here(here)

    def hold(self, folder: Path) -> None:
        """Hold the sweep's folder to the end. Raises `RunFolderError` while another start does."""
        self._stack.enter_context(alone_in(folder))

    def _say(self, cells: Sequence[Cell]) -> None:
        """Print which points are skipped and which run again, unless all are new."""
        if self._output.quiet or all(cell.why == "new" for cell in cells):
            return
        for cell in cells:
            text = f"{cell.point.words}: {cell.action.value} ({cell.why})"
            say(self._output.console, text, "dim")

    def _run_here(self, cells: Sequence[Cell]) -> None:
        """Run points on this machine to their ends."""
        from orchestrator.sweep.local import run_here  # what is drawn meanwhile takes time

        if not run_here(cells, self._output, self._ended):
            over = [EXIT_INTERRUPTED] if EXIT_INTERRUPTED in self._codes.values() else []
            self._stopped = over[0] if over else EXIT_STOPPED

    def _ended(self, one: PointEnded) -> None:
        self._codes[one.cell.run.path] = one.exit_code
        if one.refusal is not None:
            self._refused[one.cell.run.path] = one.refusal

    def finish(self) -> int:
        """Print the table; give the exit code: the worst of the points'."""
        if self._queued:  # they go on without us; the table would be of runs that have not begun
            folders = {path.parent for path in self._queued}
            shown = folders.pop() if len(folders) == 1 else self._queued[0]
            say(
                self._output.console,
                f"{plural(len(self._queued), 'point')} queued; to see where they stand: "
                f"{command('status', shown)}",
                "bold",
            )
            return max(self._codes.values(), default=0)
        varying = only_varying([cell.point.overrides for cell in self.cells])
        shown = [
            swept_run(cell.run, overrides, result=self._refusal(cell.run.path))
            for cell, overrides in zip(self.cells, varying, strict=True)
            if self._stopped is None or cell.run.config.exists()
        ]
        print_sweep(shown, self._output.console, len(self.cells) - len(shown))
        if concurrent := timed_concurrently(shown):
            say(self._output.console, concurrent, "dim", prose=True)
        elif pairs := accumulation_pairs(shown):
            print_time_and_memory(pairs, self._output.console)
        if self._stopped is not None:
            return self._stopped
        failed = [code for code in self._codes.values() if code]
        return EXIT_FAILED if EXIT_FAILED in failed else max(failed, default=0)

    def _refusal(self, path: Path) -> dict[str, Any] | None:
        """Return a substitute for the result of a point that could not start."""
        if path not in self._refused:
            return None
        culprit = Culprit(rank=None, node="launcher", cause=self._refused[path])
        state = "stopped" if self._codes[path] == EXIT_STOPPED else "failed"
        return {"state": state, "culprit": culprit.to_json()}


def resume_sweep(
    folder: Path,
    runs: Sequence[RunDir],
    output: OutputOptions,
    overrides: Sequence[str] = (),
    config_dir: str | None = None,
    *,
    changed: bool = False,
) -> int:
    """Resume points that were stopped, cancelled, failed or never submitted; return the exit code.

    Args:
        overrides: of each point, as `resume RUN` takes them.
        changed: also those whose code or data has changed since they began.

    Raises:
        RunFolderError: a point cannot be read, or another command is at work in the sweep's folder.
        ConfigError: a point cannot take the overrides. Nothing was started then.
    """
    if RunDir(folder).search.exists():
        require_optuna()
        from orchestrator.sweep.search import resume_search

        return resume_search(folder, output, overrides, config_dir)
    with contextlib.ExitStack() as open_until_the_end:
        sweep = Sweep(output, open_until_the_end)
        sweep.hold(folder)
        found = statuses(runs)[0]
        inputs: dict[str, list[str]] = {}
        with read_once():
            cells = [_cell(s, n, overrides, config_dir, inputs) for n, s in enumerate(found)]
        if inputs and not changed:
            refuse_changed(inputs)
        sweep.place(cells)
        return sweep.finish()


def _cell(
    status: RunStatus,
    number: int,
    overrides: Sequence[str],
    config_dir: str | None,
    changed: dict[str, list[str]],
) -> Cell:
    """Return the cell of a point as its folder describes it; add what has changed to `changed`."""
    run = RunDir(status.folder)
    if status.state in ("damaged", "private"):
        raise RunFolderError(
            f"nothing was started: {status.reason}; the line of the sweep, typed again, begins "
            f"such a point anew"
        )
    config = config_of(run)
    action = Action.WAIT
    if status.state in OVER:
        asked = resumption(run, config, overrides, config_dir)
        trained = status.state == "finished" and not (asked.total or 0) > status.updates
        action, config = (Action.NOTHING, config) if trained else (Action.RESUME, asked.config)
        with submission_directory(run):
            inputs = [] if trained else changed_inputs(run, asked)
        changed |= {str(run.path): inputs} if inputs else {}
    config = replace(config, run=replace(config.run, dir=str(run.path)))
    point = Point(
        number=int(run.path.name) if run.path.name.isdigit() else number,
        overrides=tuple(run.read_submission().get("overrides") or ()),
        config=config,
        plan=prepare(config, new=False),
    )
    return Cell(point=point, action=action, why=status.state, notes={})
