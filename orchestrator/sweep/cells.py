"""Cells: what a sweep still has to do for each point, known by content."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

from orchestrator.cli.status import statuses
from orchestrator.config.changes import changes, flat
from orchestrator.config.job_source import copied_script, once, read_once
from orchestrator.config.program import is_program, program_of, target_of
from orchestrator.config.schema import Config, plain
from orchestrator.errors import ConfigError, RunFolderError
from orchestrator.rundir.files import make_folder, names_in
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.status import OVER, RunStatus
from orchestrator.snapshot import digests_of_code
from orchestrator.sweep.points import Point, describe_errors

CELL = "cell"  # in submission.json
# Sections and keys that say where, when and how long to wait: a result does not depend on them.
IRRELEVANT_KEYS = (
    "run", "sweep", "facts", "tracker", "cluster.partition", "cluster.account",
    "cluster.qos", "cluster.exclude", "cluster.reservation", "cluster.comment",
    "cluster.memory_gib", "cluster.time_min", "cluster.signal_ahead_s", "cluster.requeue",
    "cluster.allocation", "cluster.exclusive", "cluster.slurm_conf", "cluster.slurm_flags",
    "cluster.srun_flags", "cluster.interface", "cluster.rendezvous_timeout_s",
    "cluster.collective_timeout_s", "cluster.heartbeat_timeout_s", "cluster.hang_timeout_s",
)  # fmt: skip
PACKAGES = ("cluster-orchestrator", "torch", "mindspore", "numpy")
MOST_FILES = 10_000
NO_NAMES = ("", ".", "..")


def made_of(config: Config, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Return what a point consists of now: its overrides, and digests of all it depends on.

    Args:
        overrides: that tell it from the sweep's other points.
    """
    return {
        "of": sorted(overrides),
        "config": _digest(_counted(plain(config))),
        "code": _code(config),
        "data": {key: once("stamp", _stamp, path) for key, path in _paths(config)},
        "versions": dict(_versions()),
    }


def why_changed(
    run: RunDir, before: Mapping[str, Any], now: Mapping[str, Any], config: Config
) -> str | None:
    """Return how a cell differs from what it was when it ran; None if it does not."""
    causes: list[str] = []
    if before.get("config") != now["config"]:
        old, new = _counted(run.read_config()), _counted(plain(config))
        causes += [change.text for change in changes(old, new)] or ["the configuration"]
    for name, digest in now["code"].items():
        if (before.get("code") or {}).get(name) != digest:
            causes.append(f"code in {name}")
    read, there = before.get("data") or {}, now["data"]
    # What was not there when it began it has not read: it may have written it.
    causes += [f"files of {key}" for key in sorted(read) if read[key] != there.get(key)]
    old, new = before.get("versions") or {}, now["versions"]
    causes += [
        f"{key} (was {old.get(key)})"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
    return ", ".join(causes) or None


def _counted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a result depends on, by dotted key; those that are not set are left
    out.
    """
    return {k: v for k, v in flat(values) if not _starts(k) and v not in (None, {}, [])}


@lru_cache(maxsize=4096)
def _starts(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in IRRELEVANT_KEYS)


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


_codes: dict[Any, dict[str, str]] = {}


def _code(config: Config) -> dict[str, str]:
    """Return digests of the source folders that a job's copy would hold. They are read once a
    command, so that all points are made of the same code.
    """
    target = target_of(config.job)
    key = target if isinstance(target, str) else target.command
    if key not in _codes:
        _codes[key] = digests_of_code(target)
    return _codes[key]


def _paths(config: Config) -> Iterator[tuple[str, Path]]:
    """Yield the paths that the job may read: its arguments, of a program's command only files
    (folders are mostly outputs), and the initial weights.
    """
    for key, value in flat(config.job):
        texts: list[Any] = value if isinstance(value, list) else [value]
        for path in _there(texts) if key != "command" else ():
            yield f"job.{key}" if texts is not value else f"{path} in job.{key}", path
    if is_program(config.job):
        program = program_of(config.job)
        own = copied_script(program)  # which is code
        words = [*program.command, *(word.partition("=")[2] for word in program.command)]
        yield from ((str(p), p) for p in _there(words) if p.is_file() and p.absolute() != own)
    for path in _there([config.train.initial_weights]):
        saved = RunDir(path).checkpoints
        yield "train.initial_weights", saved if saved.is_dir() else path


def _there(texts: Sequence[Any]) -> Iterator[Path]:
    """Yield the texts that are paths of something; skip those that are no path, or that may not be
    read.
    """
    for text in texts:
        if not isinstance(text, str) or text in NO_NAMES:
            continue
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # "~nobody" is no home
            path = Path(text).expanduser()
            path.stat()
            yield path


def _stamp(path: Path) -> str:
    """Return a digest of the names, sizes and times of a file or a folder's files: contents may be
    large.
    """
    whole = hashlib.sha256()
    for file in islice(_files(path), MOST_FILES):
        facts = file.stat()
        told = f"{file.relative_to(path)} {facts.st_size} {facts.st_mtime_ns}\n"
        whole.update(told.encode("utf-8", "surrogateescape"))  # a name may be any bytes
    return whole.hexdigest()


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders.sort()
        yield from (Path(folder, name) for name in sorted(names) if Path(folder, name).is_file())


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    """Return the versions of Python and of the packages that compute."""
    found = [("python", ".".join(map(str, sys.version_info[:3])))]
    for name in PACKAGES:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue
    return tuple(found)


REPLACED = ".replaced"  # where cells go that are begun anew, in the sweep's folder


class Action(Enum):
    """The next step for a point."""

    NOTHING = "done"
    WAIT = "in progress"
    RESUME = "to go on"
    START = "to run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A point, and what is to be done with it.

    Attributes:
        why: for people: in which state its run is, or what has changed.
        made_of: what it would be made of now.
        old: a folder that is to make room.
    """

    point: Point
    action: Action
    why: str
    made_of: Mapping[str, Any]
    old: Path | None = None

    @property
    def run(self) -> RunDir:
        return RunDir(self.point.folder)


def cells_of(points: Sequence[Point], *, force: bool = False) -> list[Cell]:
    """Return a cell for each point. Reads only; asks the scheduler once.

    Args:
        force: also those that are done.

    Raises:
        ConfigError: a cell that has changed is in progress as it was before.
        RunFolderError: a point's folder holds another run.
    """
    known = _known({point.folder.parent for point in points})
    taken = {run.path for run, _ in known.values()}
    placed = [_placed(point, known, taken) for point in points]
    runs = [RunDir(point.folder) for point in placed if point.folder in taken]
    standing = {status.folder: status for status in statuses(runs)[0]} if runs else {}
    wrong: dict[str, list[int]] = {}
    found: list[Cell] = []
    with read_once():  # of data, too: thousands of points may share it
        made = [made_of(point.config, point.identity) for point in placed]
    for point, now in zip(placed, made, strict=True):
        before = known.get(point.identity, (None, {}))[1]
        cell = _cell(point, standing.get(point.folder), before, now, force=force)
        if cell.action is Action.WAIT and (cell.why.startswith("changed") or force):
            sentence = (
                f"it is in progress as it was ({standing[point.folder].state}), and to be run anew "
                f"({cell.why}); cancel it first, or let it end"
            )
            wrong.setdefault(sentence, []).append(point.number)
        found.append(cell)
    if wrong:
        raise ConfigError("\n".join(describe_errors(wrong, points[0].number, len(points))))
    return found


def _known(sweeps: set[Path]) -> dict[tuple[str, ...], tuple[RunDir, dict[str, Any]]]:
    """Return the cells in these folders by the overrides that identify them, with notes."""
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
    """Return the point in the folder that its cell has already, or in a folder that no cell has."""
    folder = point.folder
    if point.identity in known:
        folder = known[point.identity][0].path
    number = point.number
    while point.identity not in known and folder in taken:
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
    anew = Cell(point=point, action=Action.START, why="", made_of=now, old=run.path)
    if not before or status is None:  # without a record of this cell
        if run.path.exists() and _is_half_written(run):
            return replace(anew, why="its folder is half-written")
        return replace(anew, why="new", old=None)  # its start checks what is in the folder
    if status.state == "damaged":
        return replace(anew, why=f"its folder is damaged: {status.reason}")
    changed = why_changed(run, before, now, point.config)
    cell = replace(anew, why=f"changed: {changed}" if changed else status.state)
    if status.state not in OVER:
        return replace(cell, action=Action.WAIT, old=None)
    if changed or force or not status.attempts:
        return cell
    action = Action.NOTHING if status.state == "finished" else Action.RESUME
    return replace(cell, action=action, old=None)


def _is_half_written(run: RunDir) -> bool:
    """Return True if a start of ours left the folder incomplete, or if it is damaged since."""
    if not (run.lock.exists() and run.attempts.is_dir()):
        return False
    try:
        whole = run.config.exists() and bool(run.read_config()) and run.submission.exists()
        return not (whole and run.read_submission())
    except RunFolderError:
        return True


def replaced_folder(sweep: Path, name: str) -> Path:
    """Return a new path `NAME-0`, `NAME-1`, … in the sweep's folder of what was replaced."""
    aside = sweep / REPLACED
    if not aside.is_dir():
        make_folder(aside)
    return aside / f"{name}-{sum(other.startswith(f'{name}-') for other in names_in(aside))}"


def make_room(cell: Cell) -> None:
    """Move the old content of a cell's folder aside, where people find it."""
    if cell.old is not None:
        cell.old.rename(replaced_folder(cell.old.parent, cell.old.name))
