"""What is left to do of a sweep: each point beside what an earlier start of the sweep has left.

A cell is known by its overrides, not by its number: the same line with one value more finds all
others where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from orchestrator.config.user_code.class_source import read_once
from orchestrator.errors import ConfigError, RunFolderError
from orchestrator.outcome.folder_status import OVER, RunStatus
from orchestrator.run_folder.files import make_folder, names_in
from orchestrator.run_folder.rundir import RunDir
from orchestrator.runs.status import statuses
from orchestrator.sweeps.content import CELL, made_of, why_changed
from orchestrator.sweeps.points import Point, told

REPLACED = ".replaced"  # where cells go that are begun anew, in the sweep's folder


class Do(Enum):
    """What is to be done with a point."""

    NOTHING = "done"
    WAIT = "in progress"
    GO_ON = "to go on"
    BEGIN = "to run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A point, and what is to be done with it.

    Attributes:
        why: for people: in which state its run is, or what has changed.
        made_of: what it would be made of now.
        old: a folder that is to make room.
    """

    point: Point
    do: Do
    why: str
    made_of: Mapping[str, Any]
    old: Path | None = None

    @property
    def run(self) -> RunDir:
        return RunDir(self.point.folder)


def cells_of(points: Sequence[Point], *, force: bool = False) -> list[Cell]:
    """Each point with what is to be done with it. Reads only; asks the scheduler once.

    Args:
        force: also those that are done.

    Raises:
        ConfigError: a cell that has changed is in progress as it was before.
        RunFolderError: a point's folder holds somebody else's run.
    """
    known = _known({point.folder.parent for point in points})
    taken = {run.path for run, _ in known.values()}
    placed = [_placed(point, known, taken) for point in points]
    runs = [RunDir(point.folder) for point in placed if point.folder in taken]
    standing = {status.folder: status for status in statuses(runs)[0]} if runs else {}
    wrong: dict[str, list[int]] = {}
    found: list[Cell] = []
    with read_once():  # of data, too: thousands of points may share it
        made = [made_of(point.config, point.of) for point in placed]
    for point, now in zip(placed, made, strict=True):
        before = known.get(point.of, (None, {}))[1]
        cell = _cell(point, standing.get(point.folder), before, now, force=force)
        if cell.do is Do.WAIT and (cell.why.startswith("changed") or force):
            sentence = (
                f"it is in progress as it was ({standing[point.folder].state}), and to be run anew "
                f"({cell.why}); cancel it first, or let it end"
            )
            wrong.setdefault(sentence, []).append(point.number)
        found.append(cell)
    if wrong:
        raise ConfigError("\n".join(told(wrong, points[0].number, len(points))))
    return found


def _known(sweeps: set[Path]) -> dict[tuple[str, ...], tuple[RunDir, dict[str, Any]]]:
    """The cells that lie in these folders, by what tells them apart, each with what it was made
    of.
    """
    found: dict[tuple[str, ...], tuple[RunDir, dict[str, Any]]] = {}
    for sweep in sweeps:
        for name in names_in(sweep) if sweep.is_dir() else ():
            run = RunDir(sweep / name)
            if name.startswith(".") or not run.submission.exists():
                continue
            try:
                cell = run.read_submission().get(CELL)
            except RunFolderError:  # damaged: it is looked at when a point needs its folder
                continue
            if isinstance(cell, dict):
                found[tuple(cell.get("of") or ())] = run, cell
    return found


def _placed(
    point: Point, known: Mapping[tuple[str, ...], tuple[RunDir, Any]], taken: set[Path]
) -> Point:
    """The point in the folder that its cell has already, or in one that no other cell has."""
    folder = point.folder
    if point.of in known:
        folder = known[point.of][0].path
    number = point.number
    while point.of not in known and folder in taken:
        number += 1
        folder = point.folder.parent / str(number)
    taken.add(folder)
    config = replace(point.config, run=replace(point.config.run, dir=str(folder)))
    return replace(point, config=config)


def _cell(
    point: Point,
    status: RunStatus | None,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    force: bool,
) -> Cell:
    run = RunDir(point.folder)
    if not before or status is None:
        return _unknown(point, run, now)
    anew = Cell(point=point, do=Do.BEGIN, why="", made_of=now, old=run.path)
    if status.state == "damaged":
        return replace(anew, why=f"its folder is damaged: {status.reason}")
    changed = why_changed(run, before, now, point.config)
    cell = replace(anew, why=f"changed: {changed}" if changed else status.state)
    if status.state not in OVER:
        return replace(cell, do=Do.WAIT, old=None)
    if changed or force or not status.attempts:
        return cell
    return replace(cell, do=Do.NOTHING if status.state == "finished" else Do.GO_ON, old=None)


def _unknown(point: Point, run: RunDir, now: Mapping[str, Any]) -> Cell:
    """A folder that is in the way, and is no cell: only what a start of ours left half-written, or
    damaged, makes room.
    """
    if not run.path.exists():
        return Cell(point=point, do=Do.BEGIN, why="new", made_of=now)
    begun = run.lock.exists() and run.attempts.is_dir()
    try:
        sound = run.config.exists() and bool(run.read_config()) and run.submission.exists()
        sound = sound and bool(run.read_submission())
    except RunFolderError:
        sound = False
    if begun and not sound:
        why = "its folder is half-written"
        return Cell(point=point, do=Do.BEGIN, why=why, made_of=now, old=run.path)
    return Cell(point=point, do=Do.BEGIN, why="new", made_of=now)  # its start says what is there


def make_room(cell: Cell) -> None:
    """Put what lies in a cell's folder aside, where it can be looked at."""
    if cell.old is None:
        return
    aside = cell.old.parent / REPLACED
    if not aside.is_dir():
        make_folder(aside)
    number = sum(name.startswith(f"{cell.old.name}-") for name in names_in(aside))
    cell.old.rename(aside / f"{cell.old.name}-{number}")
