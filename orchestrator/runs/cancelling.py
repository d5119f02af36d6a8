"""Stopping a run, or all points of a sweep, from another shell, wherever it runs."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from orchestrator.cli.follow import handle_of
from orchestrator.cli.status import expand, statuses
from orchestrator.clusters.api import Cluster, class_of
from orchestrator.errors import ClusterError, ConfigError, RunFolderError
from orchestrator.plan.plan_warnings import named_numbers
from orchestrator.report.status_tables import UNREADABLE
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.lock import is_held, is_waiting, signal_holder, take_waiting
from orchestrator.rundir.outcome import describe_stop
from orchestrator.rundir.status import OVER, find_runs, kind_of
from orchestrator.units import plural

LOOK_S = 0.2
HOLDER_S = 20.0  # how long a command that runs nothing here may take to end


def cancel(run: RunDir, *, now: bool = False) -> str:
    """Stop a run: as `describe_stop` says, or at once.

    Returns:
        A sentence that says what happens. Raises `ClusterError` when there is nothing to stop.
    """
    if is_waiting(run) and take_waiting(run):
        return f"{run.path} waited for room on this machine, and is not started any more"
    return handle_of(run.existing()).cancel(run, now=now)


def cancel_sweep(folder: Path, *, now: bool) -> list[str]:
    """Stop all points of a sweep that are not over, and the command that is at work in it.

    Returns:
        What happens, a sentence for all points that it happens to.

    Raises:
        ClusterError: there is nothing to stop, or the scheduler cannot be told.
        RunFolderError: there is no run in the folder, and nobody who is about to begin one.
    """
    sweep, said = RunDir(folder), list[str]()
    if is_held(sweep):
        said.append(_cancel_holder(sweep, now=now))
    runs = [] if said and not find_runs(folder, waiting=True) else expand([folder])
    open_ones = [s for s in statuses(runs)[0] if s.state not in (*OVER, *UNREADABLE)]
    members: dict[type[Cluster], list[RunDir]] = {}
    found: dict[str, list[Path]] = {}
    for status in open_ones:
        run = RunDir(status.folder)
        if run.handle.exists():
            members.setdefault(class_of(status.cluster), []).append(run)
        elif not is_held(sweep):  # somebody resumed it by itself
            said.append(handle_of(run).cancel(run, now=now))
    for cluster, some in members.items():
        for path, words in cluster.cancel_all(some, now=now).items():
            found.setdefault(words, []).append(path)
    for words, paths in found.items():
        said.append(f"{_named(paths, folder)}{': each' * (len(paths) > 1)} {words}")
    if not said:
        raise ClusterError(
            f"none of the {plural(len(runs), 'point')} in {folder} is queued or running; there is "
            f"nothing to cancel"
        )
    return said


def _cancel_holder(sweep: RunDir, *, now: bool) -> str:
    """Tell the command that is at work in a sweep's folder to end. What it submits is in the queue
    when this returns, or will not be; what it runs here ends with it, and in its time.
    """
    runs = [RunDir(path) for path in find_runs(sweep.path)]
    signal_holder(sweep, *((signal.SIGINT, signal.SIGTERM) if now else (signal.SIGINT,)))
    here = [run for run in runs if _is_here(run)]
    if here:
        how = "ends at once" if now else describe_stop(here[0])
        return f"the command that runs the sweep was told to end; what it runs {how}"
    give_up = time.monotonic() + HOLDER_S
    while is_held(sweep) and time.monotonic() < give_up:
        time.sleep(LOOK_S)
    still = "; it has not yet: what it may still submit, the same again ends" * is_held(sweep)
    return f"the command that is at work in {sweep.path} was told to end{still}"


def _is_here(run: RunDir) -> bool:
    with contextlib.suppress(ConfigError, RunFolderError):  # a damaged one keeps none from ending
        return class_of(kind_of(run)).attended
    return False


def _named(paths: Sequence[Path], sweep: Path) -> str:
    names = [str(path.relative_to(sweep)) for path in paths]
    if all(name.isdigit() for name in names):
        return named_numbers("point", sorted(map(int, names)))
    return ", ".join(names)
