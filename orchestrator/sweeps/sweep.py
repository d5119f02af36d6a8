"""The points of a sweep, one after another, and the one table at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.clusters.api import Culprit, State
from orchestrator.compose.composer import Composed
from orchestrator.config.schema import Config
from orchestrator.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED, ConfigError, UsageError
from orchestrator.plan.plan_warnings import named_numbers
from orchestrator.report.tables.sweep import print_sweep
from orchestrator.report.tables.time_and_memory import print_time_and_memory
from orchestrator.report.terminal import command, say
from orchestrator.report.units import plural
from orchestrator.run_folder.rundir import RunDir
from orchestrator.runs.console import Manner
from orchestrator.runs.new_folder import new_folder
from orchestrator.runs.start import begun, plan_and_notes, prepare
from orchestrator.sweeps.cells import accumulation_pairs, cell_of, only_varying
from orchestrator.sweeps.remarks import remarks


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One run of a sweep, checked, with its folder."""

    number: int
    overrides: tuple[str, ...]
    config: Config

    @property
    def words(self) -> str:
        """For people: which one it is."""
        return f"point {self.number}: {' '.join(self.overrides)}"


def run_sweep(found: Iterable[Composed | ConfigError], manner: Manner) -> int:
    """Check all points, run them in turn, and print their table; give the exit code.

    Raises:
        ConfigError: what is wrong with any point. Nothing has run then, and nothing was written.
    """
    points = checked(found)
    sweep = Sweep(manner)
    for point in points:
        if not sweep.run(point):
            return sweep.finish(interrupted=True)
    return sweep.finish()


def checked(found: Iterable[Composed | ConfigError]) -> list[Point]:
    """The points of a sweep, each with a folder of its own.

    Raises:
        ConfigError: all that is wrong with them, each thing once with the points that have it.
    """
    points: list[Point] = []
    wrong: dict[str, list[int]] = {}
    shared = list(found)
    for number, item in enumerate(shared):
        try:
            if isinstance(item, ConfigError):
                raise item
            config = item.config()
            prepare(config)
            points.append(Point(number=number, overrides=item.overrides, config=config))
        except UsageError as error:
            for sentence in str(error).split("\n"):
                wrong.setdefault(sentence, []).append(number)
    if wrong:
        raise ConfigError("\n".join(_told(wrong, of=len(shared))))
    stated = Counter(point.config.run.dir for point in points)
    for item, point in zip(shared, points, strict=True):
        assert isinstance(item, Composed)  # noqa: S101  # errors were raised above
        folder = point.config.run.dir
        if folder is None:
            point.config.run.dir = str(item.point_folder.absolute())
        elif stated[folder] > 1:
            point.config.run.dir = str(Path(folder) / str(point.number))
    return points


def plans(found: Iterable[Composed | ConfigError]) -> list[tuple[Point, dict[str, Any]]]:
    """The points of a sweep, each with its plan and notes. Raises as `checked` does."""
    return [(point, plan_and_notes(point.config)) for point in checked(found)]


def _told(wrong: dict[str, list[int]], *, of: int) -> Iterator[str]:
    yield f"nothing was started, for the sweep cannot run to its end (points 0 to {of - 1}):"
    for sentence, numbers in wrong.items():
        named = "all points" if len(numbers) == of else named_numbers("point", numbers)
        yield f"{named}: {sentence}"


class Sweep:
    """Runs points and remembers how they ended. A failing point does not end the sweep."""

    def __init__(self, manner: Manner) -> None:
        self._manner = manner
        self.points: list[tuple[list[str], Path, int]] = []
        self._refused: dict[int, UsageError] = {}
        self._queued: list[Path] = []

    def run(self, point: Point) -> bool:
        """Run one point; give whether the sweep goes on."""
        say(self._manner.console, point.words, "bold")
        run = new_folder(point.config)
        try:
            with begun(point.config, self._manner, overrides=point.overrides) as place:
                ended = place()
        except UsageError as error:  # what only the attempt can tell: a folder, a scheduler
            self._refused[point.number] = error
            self.points.append((list(point.overrides), run, error.exit_code))
            say(self._manner.console, f"error: {error}", "bold red")
            return True
        self.points.append((list(point.overrides), run, ended.exit_code))
        if ended.state is State.PENDING:
            self._queued.append(run)
        return ended.exit_code not in (EXIT_STOPPED, EXIT_INTERRUPTED)

    def finish(self, *, interrupted: bool = False) -> int:
        """Print the table; give the exit code: the worst of the points'."""
        codes = [code for _, _, code in self.points]
        if self._queued:  # they go on without us; the table would be of runs that have not begun
            sweep = self._queued[0].parent
            say(
                self._manner.console,
                f"{plural(len(self._queued), 'point')} queued; to see where they stand: "
                f"{command('status', sweep)}",
                "bold",
            )
            return max(codes)
        varying = only_varying([overrides for overrides, _, _ in self.points])
        cells = [
            cell_of(RunDir(self.points[number][1]), overrides, result=self._refusal(number))
            for number, overrides in enumerate(varying)
        ]
        print_sweep(cells, self._manner.console)
        for sentence in remarks(cells):
            say(self._manner.console, sentence, "dim", prose=True)
        pairs = accumulation_pairs(cells)
        if pairs:
            print_time_and_memory(pairs, self._manner.console)
        if interrupted:
            return codes[-1]
        failed = [code for code in codes if code]
        return EXIT_FAILED if EXIT_FAILED in failed else max(failed, default=0)

    def _refusal(self, number: int) -> dict[str, Any] | None:
        """What stands for the result of a point that could not start."""
        if number not in self._refused:
            return None
        culprit = Culprit(rank=None, node="launcher", cause=str(self._refused[number]))
        return {"state": "failed", "culprit": culprit.to_json()}
