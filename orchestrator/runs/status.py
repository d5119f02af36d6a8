"""Status of runs from any shell, cancelling them, and their logs."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.clusters.api import Cluster, class_of
from orchestrator.config.changes import flat
from orchestrator.errors import (
    ClusterError,
    ConfigError,
    RunFolderError,
    UsageError,
    did_you_mean,
)
from orchestrator.report.terminal import LogReader, command
from orchestrator.rundir.files import is_full
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.lock import is_locked, signal_holder
from orchestrator.rundir.metrics import HELD_OUT
from orchestrator.rundir.outcome import describe_stop
from orchestrator.rundir.status import (
    DAMAGE,
    ENDED_STATES,
    OVER,
    UNREADABLE,
    RunStatus,
    correct_by_lock,
    find_runs,
    from_folder,
    kind_of,
    mark_unknown,
    status_or_damage,
    unknown,
)
from orchestrator.runs.follow import handle_of, resolve_submissions
from orchestrator.units import named_numbers, plural


def expand(paths: Sequence[Path]) -> list[RunDir]:
    """Return the runs that paths name: a run, or all in a sweep's folder; without paths all in
    runs/.

    Raises:
        RunFolderError: a path that holds no run.
    """
    runs: list[RunDir] = []
    for path in paths or [Path.cwd() / "runs"]:
        folders = find_runs(path)
        if not folders and paths:
            RunDir(path).existing()
            raise RunFolderError(f"there is no run in {path}")
        runs += [RunDir(folder) for folder in folders]
    return runs


def statuses(runs: Iterable[RunDir]) -> tuple[list[RunStatus], list[str]]:
    """Return the status of all these runs, in their order, and sentences about failed queries.

    A run that cannot be read is a row of its own, `private` or `damaged`, and hides no other.
    """
    runs = list(runs)
    by_path: dict[Path, RunStatus] = {}
    of_schedulers: dict[str, list[RunDir]] = {}
    sentences, unresolved = resolve_submissions(runs)
    for run in runs:
        status = by_path[run.path] = status_or_damage(run, partial(_read_status, run))
        if status.job_id is not None:
            of_schedulers.setdefault(status.cluster, []).append(run)
    for kind, members in of_schedulers.items():
        try:
            cluster = class_of(kind)
        except ConfigError as error:
            sentences.append(str(error))
            mark_unknown(members, by_path, str(error))
        else:
            sentences += cluster.update_statuses(members, by_path)
    for path, status in by_path.items():
        if status.state in ("starting", "running") and not status.reason and is_full(path):
            full = "its disk is full: it trains on, but nothing of it is recorded or saved"
            by_path[path] = replace(status, reason=full)
    for path, why in unresolved.items():
        if by_path[path].state not in UNREADABLE:
            by_path[path] = replace(by_path[path], state="unknown", reason=why)
    return [by_path[run.path] for run in runs], sentences


STATUS_FIELDS = (
    "state",
    "cluster",
    "job_id",
    "nodes",
    "updates",
    "total",
    "loss",
    "learning_rate",
    "samples_per_second",
    "seconds_left",
    "attempts",
    "restarts",
    "lost_updates",
    "tags",
    "note",
)
"""Of `RunStatus`, that may be columns of `status`."""


def columns_of(run_statuses: Sequence[RunStatus], names: Sequence[str]) -> dict[str, list[Any]]:
    """Return a value of each run, for each of these names; None where it has none.

    Args:
        names: fields of `RunStatus` (`STATUS_FIELDS`), `held_out.NAME` (the latest), `best`
            (of `train.keep_best`), `seconds` (of training), or keys of the configuration.

    Raises:
        UsageError: no run has a value of that name.
    """
    columns: dict[str, list[Any]] = {name: [] for name in names}
    known = {*STATUS_FIELDS, "best", "seconds"}
    for status in run_statuses:
        settings: dict[str, Any] | None = None
        result: dict[str, Any] | None = None
        known |= {f"{HELD_OUT}{name}" for name in status.evaluation}
        for name, column in columns.items():
            value = None
            if status.state in UNREADABLE:
                pass
            elif name in STATUS_FIELDS:
                value = getattr(status, name)
            elif name.startswith(HELD_OUT):
                value = status.evaluation.get(name.removeprefix(HELD_OUT))
            elif name in ("best", "seconds"):
                result = result or RunDir(status.folder).read_result() or {}
                value = result.get(name)
                value = value["value"] if isinstance(value, dict) else value
            else:
                if settings is None:
                    settings = flat(RunDir(status.folder).read_config())
                    known |= settings.keys()
                value = settings.get(name)
            column.append(value)
    for name, column in columns.items():
        if name not in known and all(value is None for value in column):
            raise UsageError(f"no run has a value of '{name}'{did_you_mean(name, known)}")
    return columns


def sorted_by(run_statuses: Sequence[RunStatus], figure: str) -> list[RunStatus]:
    """Return runs by a figure, the best first: the largest, or with a minus before the figure the
    smallest. Runs without it come last.

    Raises:
        UsageError: no run has it.
    """
    name = figure.removeprefix("-")
    [values] = columns_of(run_statuses, [name]).values()
    pairs = list(zip(values, run_statuses, strict=True))
    numbers = [(value, run) for value, run in pairs if isinstance(value, int | float)]
    texts = [(str(value), run) for value, run in pairs if not isinstance(value, int | float | None)]
    numbers.sort(key=lambda pair: pair[0], reverse=name == figure)
    texts.sort(key=lambda pair: pair[0], reverse=name != figure)
    none = [run for value, run in pairs if value is None]
    return [*(run for _, run in numbers), *(run for _, run in texts), *none]


def _read_status(run: RunDir) -> RunStatus:
    """Return the status by the folder and, without a scheduler, its launcher's lock."""
    status = from_folder(run.existing())
    if status.job_id is not None:
        return status
    if status.state not in ENDED_STATES:
        with contextlib.suppress(ConfigError):  # the cluster's kind is not installed here
            if not run.read_submission().get("attended", class_of(status.cluster).attended):
                reason = "it was never submitted"
                if status.attempts:  # the command that submitted it was killed before it noted that
                    reason = "its job has ended without a result, and its number is not known"
                return replace(status, state="lost", reason=reason)
    return correct_by_lock(run, status)


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
    signal_holder(sweep, *((signal.SIGINT, signal.SIGTERM) if now else (signal.SIGINT,)))
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


def read_log(
    run: RunDir, rank: int | None, lines: int | None = None, *, follow: bool = False
) -> Iterator[str]:
    """Yield a log's text, or its last lines, made harmless, in bounded memory.

    The log is a rank's, or rank 0's, or before there is one, the batch script's.

    Args:
        follow: yield its growth, too, until the run has ended.

    Raises:
        RunFolderError: the rank has no log; or whether the run that is followed has ended cannot
            be known, since it is damaged or private.
    """
    reader, next_look = LogReader(run.rank_log(rank or 0), lines), 0.0
    while follow:
        yield from reader.read()
        if time.monotonic() >= next_look:
            [status], _ = statuses([run])
            if status.state in UNREADABLE:
                raise RunFolderError(status.reason or f"{run.path} cannot be read")
            if status.state in OVER:
                break
            next_look = time.monotonic() + class_of(kind_of(run)).status_interval_s
        time.sleep(0.2)
    if not os.path.lexists(reader.path):
        if rank is not None:
            known, there = "no rank began", run.ranks_with_logs()
            if there:
                known = f"there are logs of ranks {there[0]} to {there[-1]}"
            raise RunFolderError(f"{run.path} has no log of rank {rank}; {known}")
        reader = LogReader(run.batch_log, lines)
    yield from reader.read()
    yield reader.rest()


def pointer_to_culprit(run: RunDir, rank: int | None) -> str | None:
    """Return a sentence on where the log of the rank that failed first is; None if it is the log
    of `rank` (of rank 0 by default).
    """
    culprit = (run.read_result() or {}).get("culprit") or {}
    first = culprit.get("rank")
    if first is None or first == (rank or 0) or not run.rank_log(first).exists():
        return None
    return f"rank {first} failed first; its log: {command('logs', run.path)} --rank {first}"
