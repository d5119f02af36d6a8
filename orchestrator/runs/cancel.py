"""Cancelling a run, or the points of a sweep that are not over."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path

from orchestrator.clusters.api import Cluster, class_of
from orchestrator.errors import ClusterError, ConfigError, RunFolderError
from orchestrator.interrupt import STOP_REQUEST
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.lock import is_locked, signal_holder
from orchestrator.rundir.outcome import describe_stop
from orchestrator.rundir.status import DAMAGE, OVER, UNREADABLE, find_runs, kind_of, unknown
from orchestrator.runs.follow import handle_of
from orchestrator.runs.status import expand, statuses
from orchestrator.units import named_numbers, plural


def cancel(run: RunDir, *, now: bool = False) -> str:
    """Stop a run: as `describe_stop` says, or at once.

    Returns:
        A sentence that says what happens. Raises `ClusterError` when there is nothing to stop.
    """
    return handle_of(run.existing()).cancel(run, now=now)


def cancel_sweep(folder: Path, *, now: bool) -> list[str]:
    """Stop all points of a sweep that are not over, and the command that is at work in it.

    Returns:
        A sentence for all points with the same outcome.

    Raises:
        ClusterError: there is nothing to stop, or the scheduler does not answer; or a point that
            cannot be read was not stopped: the message says that, and what happens to the others.
        RunFolderError: there is no run in the folder, and no command is about to begin one.
    """
    sweep, sentences = RunDir(folder), list[str]()
    if is_locked(sweep):
        sentences.append(_cancel_holder(sweep, now=now))
    runs = [] if sentences and not find_runs(folder) else expand([folder])
    open_ones = [status for status in statuses(runs)[0] if status.state not in OVER]
    members: dict[type[Cluster], list[RunDir]] = {}
    paths_by_message: dict[str, list[Path]] = {}
    unsent: list[str] = []
    for status in open_ones:
        run = RunDir(status.folder)
        if status.state in UNREADABLE:
            try:
                if message := _cancel_unreadable(run, sweep, now=now):
                    paths_by_message.setdefault(message, []).append(run.path)
            except (ConfigError, *DAMAGE) as error:
                name = run.path.relative_to(folder)
                unsent.append(f"{name} was not cancelled: {unknown(run, error).reason}")
        elif run.handle.exists():
            members.setdefault(class_of(status.cluster), []).append(run)
        elif not is_locked(sweep):  # it was resumed alone
            handle = handle_of(run)  # raises where it may be queued
            try:
                sentences.append(handle.cancel(run, now=now))
            except ClusterError:
                if run.handle.exists() or is_locked(run):  # else it has ended meanwhile
                    raise
    for cluster, some in members.items():
        for path, message in cluster.cancel_all(some, now=now).items():
            paths_by_message.setdefault(message, []).append(path)
    for message, paths in paths_by_message.items():
        names = [str(path.relative_to(folder)) for path in paths]
        named = ", ".join(names)
        if all(name.isdigit() for name in names):
            named = named_numbers("point", sorted(map(int, names)))
        sentences.append(f"{named}{': each' * (len(paths) > 1)} {message}")
    if unsent:
        raise ClusterError("\n".join([*sentences, *unsent]))
    if not sentences:
        raise ClusterError(
            f"none of the {plural(len(runs), 'point')} in {folder} is queued or running; there is "
            f"nothing to cancel"
        )
    return sentences


def _cancel_unreadable(run: RunDir, sweep: RunDir, *, now: bool) -> str | None:
    """Stop a point of which some file cannot be read. Return what happens; None if it is over.

    Raises:
        ConfigError, or one of `DAMAGE`: the files do not say what to stop, or it cannot be done.
    """
    if run.handle.exists():
        return class_of(kind_of(run)).cancel_all([run], now=now).get(run.path)
    if is_locked(run) and not is_locked(sweep):
        return handle_of(run).cancel(run, now=now)
    return None


def _cancel_holder(sweep: RunDir, *, now: bool) -> str:
    """Ask the command that is at work in a sweep's folder to end.

    When this returns, it submits nothing more; its runs on this machine may still be ending.
    """
    runs = [RunDir(path) for path in find_runs(sweep.path)]
    signal_holder(sweep, *((signal.SIGINT, signal.SIGTERM) if now else (STOP_REQUEST,)))
    here: list[RunDir] = []
    for run in runs:
        # A damaged point must not keep the others from ending.
        with contextlib.suppress(ConfigError, RunFolderError):
            if class_of(kind_of(run)).attended:
                here.append(run)
    if here:
        how = "ends at once" if now else describe_stop(here[0])
        return f"the command that runs the sweep was asked to end; what it runs {how}"
    give_up = time.monotonic() + 20  # it runs nothing here, so it ends soon
    while is_locked(sweep) and time.monotonic() < give_up:
        time.sleep(0.2)
    still = "; it still runs: this command again cancels what it submits meanwhile"
    still *= is_locked(sweep)
    return f"the command that is at work in {sweep.path} was asked to end{still}"
