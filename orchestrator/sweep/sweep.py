"""A sweep from its points to its table."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from orchestrator.clusters.api import Culprit, class_for
from orchestrator.config.composer import Composer
from orchestrator.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    RunFolderError,
)
from orchestrator.plugins import SEARCHES
from orchestrator.report.caller import tell_begun
from orchestrator.report.sweep_tables import (
    accumulation_pairs,
    current_overrides,
    describe_outcome,
    only_varying,
    print_sweep,
    swept_run,
    timed_concurrently,
    verdict,
)
from orchestrator.report.terminal import command, say
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.lock import is_locked
from orchestrator.rundir.status import OVER, UNREADABLE, RunStatus, find_runs
from orchestrator.runs.follow import OutputOptions
from orchestrator.runs.inputs import INPUTS, rewritten_data
from orchestrator.runs.recorded import config_of, submission_directory
from orchestrator.runs.resume import changed_inputs, refuse_changed, resumption
from orchestrator.runs.start import prepare
from orchestrator.runs.status import statuses
from orchestrator.source.modules import read_once
from orchestrator.sweep.api import SearchMethod
from orchestrator.sweep.points import Point, check_points
from orchestrator.sweep.tasks import (
    POINT_RECORD,
    POINTS,
    Action,
    PointTask,
    locked_sweep,
    note_count,
    refuse_replacing,
    submit,
    tasks_of,
)
from orchestrator.units import named_numbers, plural

if TYPE_CHECKING:
    from orchestrator.sweep.local import PointResult


def run_sweep(composer: Composer, output: OutputOptions) -> int:
    """Check all points, run the unfinished ones, and print their table; return the exit code.

    Raises:
        ConfigError: what is wrong with any point. Nothing has run then, and nothing was written.
    """
    if composer.search != "none":
        return SEARCHES.make(composer.search, SearchMethod).run(composer, output)
    points = check_points(composer)
    with contextlib.ExitStack() as until_the_end:
        for folder in {point.folder.parent for point in points}:
            until_the_end.enter_context(locked_sweep(folder))
        tasks = tasks_of(points, force=any(p.config.sweep.force for p in points))
        if not composer.line.changed:
            refuse_replacing(tasks)
        note_count(tasks)
        return _run_tasks(tasks, output, accepts_changes=composer.line.changed)


def _run_tasks(
    tasks: Sequence[PointTask],
    output: OutputOptions,
    not_begun: int = 0,
    *,
    accepts_changes: bool = False,
) -> int:
    """Start or resume unfinished points, and print the table; return the worst exit code. A point
    that fails does not end the sweep.

    Args:
        not_begun: how many points the sweep has besides these.
        accepts_changes: see `PointTask`.

    Raises `UsageError` for what refuses them, before any is started.
    """
    if any(task.state != "new" for task in tasks):
        varying = only_varying([task.point.overrides for task in tasks])
        for task, overrides in zip(tasks, varying, strict=True):
            label = task.point.label(overrides)
            output.note(f"{label}: {task.action.value} ({task.why})", "dim")
    _warn_of_rewritten_data(tasks, output)
    tasks = [replace(task, accepts_changes=accepts_changes) for task in tasks]
    todo = [task for task in tasks if task.action in (Action.START, Action.RESUME)]
    alone = [task for task in todo if not class_for(task.point.config).attended]
    if alone:
        submit(alone, output)
    sweep = RunDir(tasks[0].run.path.parent)
    tell_begun(sweep.path, sweep.sweep_log)
    ended: dict[Path, PointResult] = {}
    here = [task for task in todo if task not in alone]
    if here:
        from orchestrator.sweep.local import run_here  # slow to import

        ended = run_here(here, output)
    codes = {result.exit_code for result in ended.values()} - {EXIT_FINISHED}
    queued = {c.run.path for c in tasks if c in alone or c.action is Action.IN_PROGRESS}
    if queued:  # they continue after this command
        folders = {path.parent for path in queued}
        shown = folders.pop() if len(folders) == 1 else min(queued)
        text = f"{plural(len(queued), 'point')} queued or running; to see their status: "
        say(output.console, f"{text}{command('status', shown)}", "bold")
        if not here:
            return EXIT_FINISHED
    interrupted = len(ended) < len(here)
    varying = only_varying([current_overrides(task.run, task.point.overrides) for task in tasks])
    shown = [
        swept_run(task.run, overrides, result=_refusal(ended.get(task.run.path)))
        for task, overrides in zip(tasks, varying, strict=True)
        if task.run.path not in queued and (not interrupted or task.run.config.exists())
    ]
    print_sweep(shown, output.console, len(tasks) - len(queued) - len(shown) + not_begun)
    if concurrent := timed_concurrently(shown):
        say(output.console, concurrent, "dim", prose=True)
    else:
        for pair in accumulation_pairs(shown):
            say(output.console, verdict(pair), prose=True)
    if interrupted:
        return EXIT_INTERRUPTED if EXIT_INTERRUPTED in codes else EXIT_STOPPED
    complete = EXIT_STOPPED if not_begun else EXIT_FINISHED
    return EXIT_FAILED if EXIT_FAILED in codes else max(codes, default=complete)


def _warn_of_rewritten_data(tasks: Sequence[PointTask], output: OutputOptions) -> None:
    """Warn of finished points whose data was written while they ran; a resume warns of others."""
    numbers: dict[str, list[int]] = {}
    with read_once():  # of data, which the points may share
        for task in tasks:
            if task.action is not Action.NOTHING:
                continue
            sentences: list[str] = []
            with (
                contextlib.suppress(OSError, RunFolderError),  # nothing of the point is needed
                submission_directory(task.run),
            ):
                inputs = task.run.read_submission().get(INPUTS) or {}
                sentences = rewritten_data(task.run, inputs, task.point.config)
            for sentence in sentences:
                numbers.setdefault(sentence, []).append(task.point.number)
    for sentence, named in numbers.items():
        text = f"warning: {named_numbers('point', sorted(named))}: {sentence}"
        say(output.console, text, "yellow", prose=True)


def is_sweep(folder: RunDir) -> bool:
    """Return whether a folder is a sweep's: of points, a search, or a command that begins them."""
    if folder.search.exists():
        return True
    paths = find_runs(folder.path)
    if not paths:
        return is_locked(folder)
    for path in paths:
        with contextlib.suppress(RunFolderError):
            if path.parent == folder.path and POINT_RECORD in RunDir(path).read_submission():
                return True
    return False


def follow_sweep(sweep: RunDir, console: Console, wait: Callable[[], bool]) -> None:
    """Print a line for each point that begins or ends, and the table at the end.

    Args:
        wait: returns, after some time, whether anything of the sweep still runs.
    """
    states: dict[Path, str] = {}
    runs: list[RunDir] = []
    at_work = True
    while at_work:
        at_work = wait()
        runs = [RunDir(path) for path in find_runs(sweep.path)]
        for run, status in zip(runs, statuses(runs)[0], strict=True):
            is_over = status.state in OVER
            if status.state != states.get(run.path) and (is_over or status.state == "running"):
                states[run.path] = status.state
                what = describe_outcome(run) if is_over else status.state
                say(console, f"{run.path.name}: {what}", "green" * (status.state == "finished"))
    recorded_overrides = [run.read_submission().get("overrides") or () for run in runs]
    varying = only_varying(
        [
            current_overrides(run, overrides)
            for run, overrides in zip(runs, recorded_overrides, strict=True)
        ]
    )
    shown = [swept_run(run, overrides) for run, overrides in zip(runs, varying, strict=True)]
    if shown:
        print_sweep(shown, console, _count_not_begun(runs))


def _count_not_begun(runs: Sequence[RunDir]) -> int:
    """Return how many points of a sweep have no folder, since it was interrupted before them."""
    planned: dict[Path, list[int]] = {}
    for run in runs:
        count = int(run.read_submission().get(POINTS, 0))
        planned.setdefault(run.path.parent, []).append(count)
    return sum(max(0, max(counts) - len(counts)) for counts in planned.values())


def _refusal(result: PointResult | None) -> dict[str, Any] | None:
    """Return a substitute for the result of a point that could not start."""
    if result is None or result.refusal is None:
        return None
    culprit = Culprit(rank=None, node="launcher", cause=result.refusal)
    state = "stopped" if result.exit_code == EXIT_STOPPED else "failed"
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
        ConfigError: a point cannot take the overrides. Nothing was started then. Points in progress
            continue without them, with a warning.
    """
    if RunDir(folder).search.exists():
        name = (RunDir(folder).read_search() or {}).get("search")
        if not isinstance(name, str):
            raise RunFolderError(f"{RunDir(folder).search} does not say which search it is of")
        return SEARCHES.make(name, SearchMethod).resume(folder, output, overrides, config_dir)
    with locked_sweep(folder):
        run_statuses = statuses(runs)[0]
        inputs: dict[str, list[str]] = {}
        with read_once():
            tasks = [
                _task_of_run(s, n, overrides, config_dir, inputs)
                for n, s in enumerate(run_statuses)
            ]
        if inputs and not changed:
            refuse_changed(inputs)
        if overrides and (busy := [t for t in tasks if t.action is Action.IN_PROGRESS]):
            named = named_numbers("point", sorted(task.point.number for task in busy))
            text = f"{named} of {folder} cannot take {' '.join(overrides)} while in progress"
            if not any(task.action is Action.RESUME for task in tasks):
                raise RunFolderError(f"{text}; to stop first: {command('cancel', folder)}")
            say(output.console, f"warning: {text}", "yellow", prose=True)
        return _run_tasks(tasks, output, _count_not_begun(runs), accepts_changes=changed)


def _task_of_run(
    status: RunStatus,
    number: int,
    overrides: Sequence[str],
    config_dir: str | None,
    changed: dict[str, list[str]],
) -> PointTask:
    """Return the task of a point by its folder; add its changed inputs to `changed`."""
    run = RunDir(status.folder)
    if status.state in UNREADABLE:
        raise RunFolderError(
            f"nothing was started: {status.reason}; the sweep's command, repeated, restarts "
            f"such points"
        )
    config = config_of(run)
    action = Action.IN_PROGRESS
    if status.state in OVER:
        resumed = resumption(run, config, overrides, config_dir)
        trained = resumed.is_complete(run.read_result())
        action, config = (Action.NOTHING, config) if trained else (Action.RESUME, resumed.config)
        with submission_directory(run):
            inputs = [] if trained else changed_inputs(run, resumed)
        changed |= {str(run.path): inputs} if inputs else {}
    config = replace(config, run=replace(config.run, dir=str(run.path)))
    with submission_directory(run):
        plan = prepare(config, new=False)
    recorded_overrides = run.read_submission().get("overrides") or ()
    more = overrides if action is Action.RESUME else ()
    point = Point(
        number=int(run.path.name) if run.path.name.isdigit() else number,
        overrides=tuple(current_overrides(run, recorded_overrides, more)),
        config=config,
        plan=plan,
    )
    return PointTask(
        point=point, action=action, state=status.state, notes={}, overrides=tuple(overrides)
    )
