"""Status of runs, from any shell."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.clusters.api import class_of
from orchestrator.config.changes import flat
from orchestrator.errors import ConfigError, RunFolderError, UsageError, did_you_mean
from orchestrator.rundir.files import is_full
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import HELD_OUT
from orchestrator.rundir.status import (
    ENDED_STATES,
    UNREADABLE,
    RunStatus,
    correct_by_lock,
    find_runs,
    from_folder,
    mark_unknown,
    status_or_damage,
)
from orchestrator.runs.follow import resolve_submissions


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


def columns_of(
    run_statuses: Sequence[RunStatus], names: Sequence[str], sentences: list[str] | None = None
) -> dict[str, list[Any]]:
    """Return a value of each run, for each of these names; None where it has none.

    Args:
        names: fields of `RunStatus` (`STATUS_FIELDS`), `held_out.NAME` (the latest), `best`
            (of `train.keep_best`), `seconds` (of training), or keys of the configuration.
        sentences: gets one about each run whose configuration cannot be read; it has no values.

    Raises:
        UsageError: no run has a value of that name.
    """
    damage: list[str] = []
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
                    try:
                        settings = flat(RunDir(status.folder).read_config())
                    except RunFolderError as error:  # an edited one, which hides no other run
                        settings = {}
                        damage.append(str(error))
                    known |= settings.keys()
                value = settings.get(name)
            column.append(value)
    for name, column in columns.items():
        if name not in known and all(value is None for value in column):
            refusal = f"no run has a value of '{name}'{did_you_mean(name, known)}"
            raise UsageError("\n".join([refusal, *damage]))
    if sentences is not None:
        sentences += damage
    return columns


def sorted_by(
    run_statuses: Sequence[RunStatus], figure: str, sentences: list[str] | None = None
) -> list[RunStatus]:
    """Return runs by a figure, the best first: the largest, or with a minus before the figure the
    smallest. After numbers come NaNs, and last runs without it.

    Args:
        sentences: as of `columns_of`.

    Raises:
        UsageError: no run has it.
    """
    name = figure.removeprefix("-")
    [values] = columns_of(run_statuses, [name], sentences).values()
    pairs = list(zip(values, run_statuses, strict=True))
    numbers = [(value, run) for value, run in pairs if isinstance(value, int | float)]
    nans = [run for value, run in numbers if _is_nan(value)]  # which is not less than anything
    numbers = [(value, run) for value, run in numbers if not _is_nan(value)]
    texts = [(str(value), run) for value, run in pairs if not isinstance(value, int | float | None)]
    numbers.sort(key=lambda pair: pair[0], reverse=name == figure)
    texts.sort(key=lambda pair: pair[0], reverse=name != figure)
    none = [run for value, run in pairs if value is None]
    return [*(run for _, run in numbers), *nans, *(run for _, run in texts), *none]


def _is_nan(value: float) -> bool:
    return isinstance(value, float) and math.isnan(value)


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
