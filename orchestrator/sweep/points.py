"""Points of a sweep, checked together before anything is written."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.config.command_line import key_of
from orchestrator.config.composer import Composer
from orchestrator.config.schema import Config, plain
from orchestrator.errors import ConfigError, UsageError
from orchestrator.plan.plan import Plan
from orchestrator.plan.program import ProgramPlan
from orchestrator.runs.start import prepare, stated_folder
from orchestrator.source.modules import read_once
from orchestrator.units import named_numbers, short_overrides

# Sections that do not tell a point from another.
NOT_IDENTIFYING = ("run", "sweep")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One run of a sweep, checked, with its folder.

    Attributes:
        flags: that choose the configuration's files.
        point_key: its overrides that tell it from the sweep's other points.
        own_folder: for it alone, if `run.dir` is not stated.
    """

    number: int
    overrides: tuple[str, ...]
    config: Config
    plan: Plan | ProgramPlan
    flags: tuple[str, ...] = ()
    point_key: tuple[str, ...] = ()
    own_folder: Path = Path()

    def label(self, varying: Mapping[str, str]) -> str:
        """Return its number and the overrides that vary in the sweep (`only_varying`), for
        messages.
        """
        return f"point {self.number}" + (f": {short_overrides(varying)}" if varying else "")

    @property
    def folder(self) -> Path:
        return Path(str(self.config.run.dir))


def identifies(override: str) -> bool:
    """Return True if an override alone tells a point from another."""
    return key_of(override).split(".")[0] not in NOT_IDENTIFYING


def check_points(composer: Composer) -> list[Point]:
    """Return the points of a sweep, each with a folder of its own.

    Raises:
        ConfigError: all that is wrong with them, each thing once with the points that have it.
    """
    combinations = composer.combinations()
    points: list[Point] = []
    wrong: dict[str, list[int]] = {}
    with read_once():
        for number, overrides in enumerate(combinations):
            try:
                points.append(_point(composer, number, overrides))
            except UsageError as error:
                for sentence in str(error).split("\n"):
                    wrong.setdefault(sentence, []).append(number)
    refuse_points(wrong, 0, len(combinations))
    alike: dict[str, list[int]] = {}
    for point in points:
        values = json.dumps(plain(point.config), sort_keys=True, default=str)
        alike.setdefault(values, []).append(point.number)
    for numbers in alike.values():
        if len(numbers) > 1:  # they would be computed and shown twice
            why = "they are equal; leave all but one of them out"
            refuse_points({why: numbers}, 0, len(combinations))
    folder_counts = Counter(point.config.run.dir for point in points)
    shared = set(points[0].overrides).intersection(*(point.overrides for point in points))
    # A resolved folder equal to the typed text had no interpolation: it is the sweep's own, so even
    # a single point goes below it.
    alone = {folder for folder, count in folder_counts.items() if count == 1} - {composer.run_dir}
    return [_with_folder_and_key(p, shared, apart=p.config.run.dir not in alone) for p in points]


def trial_point(composer: Composer, number: int, overrides: Sequence[str]) -> Point:
    """Return a point that a search draws, with a folder of its own. Raises `UsageError`."""
    point = _point(composer, number, overrides)
    return _with_folder_and_key(point, point.overrides, apart=True)


def _with_folder_and_key(point: Point, shared: Collection[str], *, apart: bool) -> Point:
    """Return the point with its folder and the overrides that identify it.

    Args:
        shared: by all points; of these, those of where and how a point runs do not identify it.
        apart: other points have the same `run.dir`.
    """
    folder = stated_folder(point.config.run.dir or str(point.own_folder))
    if point.config.run.dir and apart:
        folder /= str(point.number)
    point.config.run.dir = str(folder)
    overrides = point.overrides
    point_key = sorted(o.lstrip("+") for o in overrides if identifies(o) or o not in shared)
    return replace(point, point_key=tuple(point_key))


def _point(composer: Composer, number: int, overrides: Sequence[str]) -> Point:
    item = composer.point(number, overrides)
    config = item.config()
    return Point(
        number=number,
        overrides=item.overrides,
        config=config,
        plan=prepare(config),
        flags=item.flags,
        own_folder=item.point_folder,
    )


def refuse_points(
    wrong: Mapping[str, Sequence[int]], first: int, count: int, hint: str | None = None
) -> None:
    """Raise `ConfigError` if there are errors of points.

    Args:
        wrong: each error with the numbers of the points that have it.
        first, count: of all points.
    """
    if not wrong:
        return
    last = first + count - 1
    lines = [
        f"nothing was started, for the sweep cannot run to its end (points {first} to {last}):"
    ]
    for sentence, numbers in wrong.items():
        named = "all points" if len(numbers) == count else named_numbers("point", numbers)
        lines.append(f"{named}: {sentence}")
    raise ConfigError("\n".join([*lines, *filter(None, [hint])]))
