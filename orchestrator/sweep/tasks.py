"""Tasks: the next step for each point of a sweep, known by content; their submission."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from orchestrator.clusters.api import class_of
from orchestrator.config.changes import changes, values_of_result
from orchestrator.config.program import is_program
from orchestrator.config.rules import max_concurrent_points
from orchestrator.config.schema import Config, plain
from orchestrator.errors import ClusterError, Interrupted, NotNow, RunFolderError, UsageError
from orchestrator.interrupt import interrupts
from orchestrator.plugins import CLUSTERS
from orchestrator.rundir.checkpoints import list_checkpoints
from orchestrator.rundir.files import make_folder, names_in, write_json, written_together
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.lock import locked
from orchestrator.rundir.status import OVER, RunStatus
from orchestrator.runs.follow import OutputOptions, PreparedRun, handle_of, put_back
from orchestrator.runs.inputs import INPUTS, differences, inputs_of, other_versions
from orchestrator.runs.resume import prepared_resume
from orchestrator.runs.start import prepared_run, wrap_disk_errors
from orchestrator.runs.status import statuses
from orchestrator.source.modules import read_once
from orchestrator.sweep.points import Point, refuse_points
from orchestrator.units import plural

POINT_RECORD = "point"  # in submission.json
POINTS = "points"  # there, too: how many the command had for this folder


def notes_of(config: Config, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Return the content of a point for its submission.json: overrides, configuration, inputs.

    Args:
        overrides: the point's key; see `Point`.
    """
    text = json.dumps(values_of_result(plain(config)), sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {POINT_RECORD: {"of": sorted(overrides), "config": digest}, INPUTS: inputs_of(config)}


def why_changed(
    run: RunDir, before: Mapping[str, Any], now: Mapping[str, Any], config: Config
) -> str | None:
    """Return the changes of a task since it ran; None if there are none.

    Args:
        before, now: as `notes_of` returns them.
    """
    causes: list[str] = []
    if (before.get(POINT_RECORD) or {}).get("config") != now[POINT_RECORD]["config"]:
        old, new = values_of_result(run.read_config()), values_of_result(plain(config))
        causes += [change.text for change in changes(old, new)] or ["the configuration"]
    inputs = before.get(INPUTS) or {}
    causes += [*differences(run, inputs, config), *other_versions(inputs)]
    return ", ".join(causes) or None


REPLACED = ".replaced"  # where tasks go that are begun anew, in the sweep's folder


class Action(Enum):
    """The next step for a point."""

    NOTHING = "done"
    IN_PROGRESS = "in progress"
    RESUME = "to go on"
    START = "to run"


@dataclass(frozen=True, kw_only=True, slots=True)
class PointTask:
    """A point, and the next step for it.

    Attributes:
        state: of its run; "new" without one, or what is wrong with its folder.
        notes: as `notes_of` returns them now.
        changed: what has changed since its run began.
        old: an existing folder, moved aside before the start.
        replaces: `old` holds results or checkpoints, and the inputs have changed since.
        overrides: that a person gave to resume it.
        accepts_changes: in what a resumed run began with, by --changed.
    """

    point: Point
    action: Action
    state: str
    notes: Mapping[str, Any]
    changed: str | None = None
    old: Path | None = None
    replaces: bool = False
    overrides: tuple[str, ...] = ()
    accepts_changes: bool = False

    @property
    def why(self) -> str:
        """Return the reason for the action, for people."""
        return f"changed: {self.changed}" if self.changed else self.state

    @property
    def run(self) -> RunDir:
        return RunDir(self.point.folder)


def tasks_of(points: Sequence[Point], *, force: bool = False) -> list[PointTask]:
    """Return a task for each point. Reads only; asks the scheduler once.

    Args:
        force: also those that are done.

    Raises:
        ConfigError: a task that has changed is in progress as it was before.
        RunFolderError: a point's folder holds another run.
    """
    known = _recorded_tasks({point.folder.parent for point in points})
    taken = {run.path for run, _ in known.values()}
    placed = [_with_folder(point, known, taken) for point in points]
    by_folder = {s.folder: s for s in statuses(RunDir(point.folder) for point in placed)[0]}
    wrong: dict[str, list[int]] = {}
    counts = Counter(point.folder.parent for point in placed)
    with read_once():  # of data, too: thousands of points may share it
        new_notes = [
            {**notes_of(point.config, point.point_key), POINTS: counts[point.folder.parent]}
            for point in placed
        ]
        tasks = [
            _task_of_point(
                point,
                by_folder[point.folder],
                known.get(point.point_key, (None, {}))[1],
                now,
                force=force,
            )
            for point, now in zip(placed, new_notes, strict=True)
        ]
    for point, task in zip(placed, tasks, strict=True):
        if task.action is Action.IN_PROGRESS and (task.changed or force):
            state = by_folder[point.folder].state
            sentence = (
                f"it is in progress as it was ({state}), and to be run anew ({task.why}); cancel "
                f"it first, or let it end"
            )
            wrong.setdefault(sentence, []).append(point.number)
    refuse_points(wrong, points[0].number, len(points))
    return tasks


def _recorded_tasks(sweeps: set[Path]) -> dict[tuple[str, ...], tuple[RunDir, dict[str, Any]]]:
    """Return the tasks in these folders by the overrides that identify them, with notes."""
    tasks: dict[tuple[str, ...], tuple[RunDir, dict[str, Any]]] = {}
    for sweep in sweeps:
        for name in names_in(sweep) if sweep.is_dir() else ():
            run = RunDir(sweep / name)
            if name.startswith(".") or not run.submission.exists():
                continue
            try:
                notes = run.read_submission()
            except RunFolderError:  # damaged: it is looked at when a point needs its folder
                continue
            # Of copies, such as 3 and 3.bak, the first by name counts.
            if (recorded := notes.get(POINT_RECORD)) is not None:
                tasks.setdefault(tuple(recorded.get("of") or ()), (run, notes))
    return tasks


def _with_folder(
    point: Point, known: Mapping[tuple[str, ...], tuple[RunDir, Any]], taken: set[Path]
) -> Point:
    """Return the point in the folder that its task has already, or in a folder that no task has."""
    folder = point.folder
    if point.point_key in known:
        folder = known[point.point_key][0].path
    number = point.number
    while point.point_key not in known and folder in taken:
        number += 1
        folder = point.folder.parent / str(number)
    taken.add(folder)
    config = replace(point.config, run=replace(point.config.run, dir=str(folder)))
    return replace(point, config=config)


def _task_of_point(
    point: Point,
    status: RunStatus,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    force: bool,
) -> PointTask:
    run = RunDir(point.folder)
    anew = PointTask(point=point, action=Action.START, state="new", notes=now, old=run.path)
    if not before:  # without a record of this task
        if run.path.exists() and _is_half_written(run):
            return replace(anew, state="its folder is half-written")
        return replace(anew, old=None)  # its start checks the folder
    if status.state == "damaged":
        return replace(anew, state=f"its folder is damaged: {status.reason}")
    changed = why_changed(run, before, now, point.config)
    task = replace(anew, state=status.state, changed=changed)
    if status.state not in OVER:
        return replace(task, action=Action.IN_PROGRESS, old=None)
    if changed or force or not status.attempts:
        # Who mended the code of a failed point needs no option, unless that costs its updates.
        saved = names_in if is_program(point.config.job) else list_checkpoints
        loses_updates = status.state == "finished" or bool(saved(run.checkpoints))
        return replace(task, replaces=loses_updates and not force)
    action = Action.NOTHING if status.state == "finished" else Action.RESUME
    return replace(task, action=action, old=None)


def _is_half_written(run: RunDir) -> bool:
    """Return True if a start of ours left the folder incomplete, or if it is damaged since."""
    if not run.lock.exists():
        return False
    if not run.attempts.is_dir():
        return {*names_in(run.path)} <= {run.lock.name, run.logs.name, run.checkpoints.name}
    try:
        whole = run.config.exists() and bool(run.read_config()) and run.submission.exists()
        return not (whole and run.read_submission())
    except RunFolderError:
        return True


def replaced_folder(sweep: Path, name: str) -> Path:
    """Return a new path `NAME-0`, `NAME-1`, … in the sweep's folder of what was replaced."""
    aside = sweep / REPLACED
    with contextlib.suppress(FileExistsError):  # another point may need it as well
        make_folder(aside)
    there = [other.rpartition("-") for other in names_in(aside)]
    numbers = [int(number) for of, _, number in there if of == name and number.isdigit()]
    return aside / f"{name}-{max(numbers, default=-1) + 1}"


def refuse_replacing(tasks: Sequence[PointTask]) -> None:
    """Raise `ConfigError` if results or checkpoints would be given up because of changes."""
    wrong: dict[str, list[int]] = {}
    for task in tasks:
        if task.replaces:
            progress = "" if task.state == "finished" else " with a checkpoint"
            sentence = f"{task.state}{progress}, and {task.why}"
            wrong.setdefault(sentence, []).append(task.point.number)
    ways = (
        f"--changed runs them from the start (the old folders move to {REPLACED}); `resume SWEEP "
        f"--changed` continues unfinished ones; another run.dir keeps these results"
    )
    refuse_points(wrong, tasks[0].point.number, len(tasks), ways)


def note_count(tasks: Sequence[PointTask]) -> None:
    """Note in a point of an earlier command how many points the sweep has now, so that `resume`
    counts new ones also if an interrupt comes before the first of them.
    """
    counts = Counter(task.run.path.parent for task in tasks)
    for task in tasks:
        if task.action in (Action.NOTHING, Action.RESUME):
            noted, count = task.run.read_submission(), counts.pop(task.run.path.parent, 0)
            if noted.get(POINTS, 0) < count:
                write_json(task.run.submission, {**noted, POINTS: count})


# ------------------------------------------------------------------ Starting them


@contextlib.contextmanager
def locked_sweep(folder: Path) -> Generator[None]:
    """Lock a sweep's folder; remove it again if it stays empty.

    Raises:
        RunFolderError: another command holds it.
    """
    sweep = RunDir(folder)
    with contextlib.ExitStack() as until_the_end:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            until_the_end.enter_context(locked(sweep))
        except OSError as error:
            raise RunFolderError(f"{folder} cannot be written: {error.strerror}") from error
        try:
            yield
        finally:
            if {entry.name for entry in folder.iterdir()} <= {sweep.lock.name}:
                sweep.lock.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # another process has put something there
                    folder.rmdir()


@contextlib.contextmanager
def prepared_task(task: PointTask, output: OutputOptions) -> Generator[PreparedRun | None]:
    """Prepare a task's run: a new one, or one that continues."""
    point, path = task.point, task.run.path
    if task.action is Action.RESUME:
        with prepared_resume(
            path,
            output,
            task.overrides,
            to=point.config,
            changed=task.accepts_changes,
            # With all points, perhaps hours ago: an edit since then stops none that has waited.
            checked=True,
        ) as ready:
            yield ready
        return
    aside: Path | None = None
    if task.old is not None:
        aside = _move_aside(task.old, task.state)
    try:
        with prepared_run(
            point.config,
            output,
            overrides=point.overrides,
            flags=point.flags,
            plan=point.plan,
            notes=task.notes,
        ) as ready:
            yield replace(ready, replaced=aside)
    except BaseException:
        put_back(aside, path)
        raise


def _move_aside(old: Path, state: str) -> Path:
    """Move a run's folder away; return where it is then.

    Raises:
        RunFolderError: the run is in progress. A point may have been resumed alone since its task
            was found, and about a damaged folder the scheduler was not asked.
    """
    run = RunDir(old)
    if state.startswith("its folder"):  # damaged or half-written: the scheduler was not asked
        try:
            standing = handle_of(run).in_progress()
        except RunFolderError as error:
            raise RunFolderError(
                f"{error}, so whether {old} is in progress is not known; make sure that no job of "
                "it is queued or running, then move it away"
            ) from error
        if standing:
            raise RunFolderError(f"{old} is in progress ({standing}); stop that run first")
    with locked(run):
        aside = replaced_folder(old.parent, old.name)
        old.rename(aside)
    return aside


def submit(tasks: Sequence[PointTask], output: OutputOptions) -> None:
    """Submit them, by kinds of clusters; nothing is submitted before all folders are written.

    Raises:
        ConfigError: one of them cannot be; none was submitted then, and no new folder is left.
        Interrupted: by a person, before the first was submitted.
        NotNow: the scheduler is silent, and nothing was submitted.
        ClusterError: the scheduler refused some; queued ones continue, and are counted.
    """
    with interrupts, read_once():
        runs = _prepare_all(tasks, OutputOptions(console=output.console, quiet=True))
        most = max_concurrent_points(tasks[0].point.config.sweep.parallel)
        for kind in sorted({ready.config.cluster.kind for ready in runs}):
            members = [(r.cluster, r.request) for r in runs if r.config.cluster.kind == kind]
            try:
                with CLUSTERS.wrap_errors(kind, "to submit the points"):
                    class_of(kind).submit_all(members, most)
            except BaseException as error:
                _withdraw(runs)
                queued = [ready for ready in runs if ready.is_queued]
                if not queued or not isinstance(error, ClusterError):
                    raise
                raise ClusterError(
                    f"{error}\n{plural(len(queued), 'point')} of {len(runs)} "
                    f"{'is' if len(queued) == 1 else 'are'} queued; the same line again submits "
                    f"the others"
                ) from error


def _prepare_all(tasks: Sequence[PointTask], quiet: OutputOptions) -> list[PreparedRun]:
    """Write all runs to the disk, or none and raise why.

    Each run's lock is free again before anything is submitted: the sweep's keeps others away.
    """
    runs: list[PreparedRun] = []
    wrong: dict[str, list[int]] = {}
    sweeps = {task.run.path.parent for task in tasks}
    try:
        with wrap_disk_errors(RunDir(tasks[0].run.path.parent)), written_together(sweeps):
            for task in tasks:
                _refuse_interrupted()
                try:
                    with prepared_task(task, quiet) as ready:
                        runs += [ready] if ready is not None else []
                except NotNow:  # it is nothing that is wrong with a point
                    raise
                except UsageError as error:
                    wrong.setdefault(str(error), []).append(task.point.number)
            refuse_points(wrong, min(task.point.number for task in tasks), len(tasks))
        _refuse_interrupted()
    except BaseException:
        _withdraw(runs)
        raise
    return runs


def _refuse_interrupted() -> None:
    if interrupts.count:
        raise Interrupted("interrupted: none of the points was submitted")


def _withdraw(runs: Sequence[PreparedRun]) -> None:
    for ready in runs:
        with contextlib.suppress(OSError, RunFolderError):  # why they are withdrawn matters more
            ready.withdraw()
