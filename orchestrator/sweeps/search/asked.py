"""What a line asks a search for, with all that can be refused before its first trial."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.clusters.api import class_for
from orchestrator.compose.command_line import key_of
from orchestrator.compose.composer import Composer
from orchestrator.compose.hydra.input import guarded
from orchestrator.compose.hydra.loader import OF_A_SEARCH
from orchestrator.compose.search_space import Axis, Space, space_of
from orchestrator.config.rules import at_once
from orchestrator.config.schema import SweepConfig
from orchestrator.config.search_rules import SMALL_IS_GOOD
from orchestrator.config.user_code.class_source import read_once
from orchestrator.config.user_code.job_source import check_target
from orchestrator.config.user_code.program_section import is_program
from orchestrator.errors import ConfigError, UsageError, did_you_mean
from orchestrator.sweeps.budget import gpu_hours
from orchestrator.sweeps.points import Point, telling, trial
from orchestrator.sweeps.todo import Cell, Do

TRIES = 8  # combinations in which a value is tried before it counts as one that none can have
ON_A_SCHEDULER = 4  # trials at once with sweep.parallel=auto: all at once would be no search


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One search.

    Attributes:
        folder: the sweep's.
        trials: how many there are to be.
        most: at once; None: as many as this machine has room for.
        attended: trials run on this machine, held by the search.
    """

    composer: Composer
    space: Space
    sweep: SweepConfig
    folder: Path
    trials: int
    most: int | None
    attended: bool

    @property
    def maximize(self) -> bool:
        return self.sweep.direction == "maximize"

    @property
    def made_of(self) -> dict[str, Any]:
        """What makes it this search: its trials are those of no search that differs in it."""
        return {
            **{axis.key: axis.told() for axis in self.space.axes},
            **{f"sweep.{name}": getattr(self.sweep, name) for name in OF_A_SEARCH},
            **{key_of(o): o for o in self.space.fixed if telling(o)},
        }

    def point(self, number: int, drawn: Mapping[str, Any]) -> Point:
        """A trial's. Raises `UsageError` where there can be none."""
        return _composed(self.composer, self.space, number, drawn)


def asked_of(composer: Composer) -> Asked:
    """Raises `ConfigError` for what cannot be searched."""
    with guarded():
        space = space_of(composer.loader.swept(composer.stated))
    with read_once():
        points = _sampled(composer, space)
    first = points[0]
    sweep, attended = first.config.sweep, class_for(first.config).attended
    trials = sweep.trials or 0
    if sweep.search == "grid":
        trials = _of_grid(space, sweep)
    _refuse_objective(first, sweep)
    _refuse_beyond(points, trials)
    most = at_once(sweep.parallel)
    return Asked(
        composer=composer,
        space=space,
        sweep=sweep,
        folder=first.folder.parent,
        trials=trials,
        most=most if attended else most or ON_A_SCHEDULER,
        attended=attended,
    )


def _composed(composer: Composer, space: Space, number: int, drawn: Mapping[str, Any]) -> Point:
    [item] = composer.points([space.overrides(drawn)], number)
    return trial(item, number)


def _sampled(composer: Composer, space: Space) -> list[Point]:
    """A point with each alternative, and near the ends of each interval. Raises `ConfigError` for
    values that no trial could have, as far as a few combinations with the others tell.
    """
    points: list[Point] = []
    wrong: dict[str, str] = {}
    for axis in space.axes:
        for value in axis.samples:
            sentence = ""
            for drawn in _combinations(space, axis, value):
                try:
                    points.append(_composed(composer, space, 0, drawn))
                    break
                except UsageError as error:
                    sentence = sentence or str(error)
            else:
                wrong[axis.text(value).lstrip("+")] = sentence
    if wrong and not points:  # it is nothing that was chosen
        raise ConfigError("\n".join(dict.fromkeys(wrong.values())))
    if wrong:
        raise ConfigError(
            "\n".join(f"no trial can have {text}: {why}" for text, why in wrong.items())
        )
    return points


def _combinations(space: Space, axis: Axis, value: Any) -> Iterator[dict[str, Any]]:
    """Different ones, in which an axis has this value."""
    drawn = random.Random(0)  # noqa: S311  # nothing secret
    seen: list[dict[str, Any]] = []
    for number in range(TRIES):
        found = {
            other.key: drawn.choice(other.samples) if number else other.samples[0]
            for other in space.axes
        } | {axis.key: value}
        if found not in seen:
            seen.append(found)
            yield found


def _of_grid(space: Space, sweep: SweepConfig) -> int:
    if space.size is None:
        endless = next(axis.name for axis in space.axes if not axis.texts)
        raise ConfigError(
            f"sweep.search=grid tries all points, and {endless} has them without end; give it "
            f"values (a,b or range(…)), or use sweep.search=tpe"
        )
    if (sweep.trials or 0) > space.size:
        raise ConfigError(
            f"sweep.trials={sweep.trials}, but the grid has {space.size} points; leave it out"
        )
    return sweep.trials or space.size


def _refuse_objective(point: Point, sweep: SweepConfig) -> None:
    """Where the job's source tells which figures it evaluates, and the objective is none."""
    if is_program(point.config.job) or sweep.objective in SMALL_IS_GOOD:
        return
    figures = check_target(point.config.job).figures
    if figures is not None and sweep.objective not in figures:
        known = [*figures, *SMALL_IS_GOOD]
        raise ConfigError(
            f"sweep.objective={sweep.objective}: {point.config.job['_target_']} measures no such "
            f"figure{did_you_mean(sweep.objective, known)}"
        )


def _refuse_beyond(points: Sequence[Point], trials: int) -> None:
    """Raise `ConfigError` where trials like these cost more than `budget.gpu_hours`, or might."""
    limit = points[0].config.budget.gpu_hours
    if limit is None:
        return
    hours = [gpu_hours(Cell(point=p, do=Do.BEGIN, why="", made_of={})) for p in points]
    known = [hour for hour in hours if hour is not None]
    if len(known) < len(hours):
        raise ConfigError(
            f"budget.gpu_hours={limit:g} cannot be kept: how long a trial runs is not known; set "
            f"facts.update_s, or the limit cluster.time_min"
        )
    if (total := trials * max(known)) > limit:
        raise ConfigError(
            f"{trials} trials take up to {total:.3g} GPU-hours by their plans, more than "
            f"budget.gpu_hours={limit:g}"
        )
