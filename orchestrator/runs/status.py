"""Where runs stand, from any shell at any time: by their folders, and by what their clusters say.

Where nobody answers, the folders tell: a result, or hearts that beat.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from orchestrator.cli.follow import settle_submissions
from orchestrator.clusters.api import class_of
from orchestrator.errors import ConfigError, RunFolderError
from orchestrator.report.status_tables import UNREADABLE
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.lock import WAITING_REASON, is_waiting
from orchestrator.rundir.metrics import loss_curve
from orchestrator.rundir.status import (
    ENDED_STATES,
    RunStatus,
    find_runs,
    from_folder,
    infer_from_heartbeats,
    status_or_damage,
    with_lock,
)


def expand(paths: Sequence[Path]) -> list[RunDir]:
    """The runs that paths name: a run, or all runs in a sweep's folder; none given: all in runs/.

    Raises:
        RunFolderError: a path that holds no run.
    """
    runs: list[RunDir] = []
    for path in paths or [Path.cwd() / "runs"]:
        found = find_runs(path, waiting=True)
        if not found and paths:
            RunDir(path).existing()
            raise RunFolderError(f"there is no run in {path}")
        runs += [RunDir(folder) for folder in found]
    return runs


def statuses(runs: Iterable[RunDir]) -> tuple[list[RunStatus], list[str]]:
    """Where all these runs stand, in their order, and sentences about what could not be asked.

    A run that cannot be read is a row of its own, `private` or `damaged`, and hides no other.
    """
    runs = list(runs)
    found: dict[Path, RunStatus] = {}
    alone: dict[str, list[RunDir]] = {}
    sentences, unknown = settle_submissions(runs)
    for run in runs:
        found[run.path] = status_or_damage(run, partial(_first_look, run, alone))
    for kind, members in alone.items():
        try:
            cluster = class_of(kind)
        except ConfigError as error:
            sentences.append(str(error))
            infer_from_heartbeats(members, found)
        else:
            sentences += cluster.look(members, found)
    for path, why in unknown.items():
        if found[path].state not in UNREADABLE:
            found[path] = replace(found[path], state="unknown", reason=why)
    return [found[run.path] for run in runs], sentences


def _first_look(run: RunDir, alone: dict[str, list[RunDir]]) -> RunStatus:
    """What the folder and its launcher's lock say; a run that goes on alone is put down for its
    cluster to be asked.
    """
    if is_waiting(run):
        new = RunStatus(folder=run.path, state="pending", cluster="local")
        known = from_folder(run) if run.config.exists() else new
        return replace(known, state="pending", reason=WAITING_REASON)
    status = from_folder(run.existing())
    if status.job_id is not None:
        alone.setdefault(status.cluster, []).append(run)
        return status
    if status.state not in ENDED_STATES and not _is_held(run, status.cluster):
        return replace(status, state="lost", reason="it was never submitted")
    return with_lock(run, status)


def _is_held(run: RunDir, kind: str) -> bool:
    """Whether a launcher holds it; so it is where the kind is not installed here."""
    try:
        return bool(run.read_submission().get("held", class_of(kind).attended))
    except ConfigError:
        return True


def losses_so_far(status: RunStatus, points: int) -> list[float]:
    """A run's losses from its beginning to now; none where it cannot be read."""
    if status.state in UNREADABLE:
        return []
    return loss_curve(RunDir(status.folder).metrics, points)
