"""Where runs stand, from any shell at any time: their folders, and one question to the scheduler.

For any number of runs there is one squeue call a cluster, and one sacct call where squeue has
forgotten a job. Where neither answers, the folders tell: a result, or hearts that beat.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from orchestrator.errors import ClusterError, RunFolderError
from orchestrator.run_folder.files import names_in
from orchestrator.report.metrics_glance import loss_course
from orchestrator.report.tables.status_table import UNREADABLE
from orchestrator.run_folder.rundir import RunDir
from orchestrator.outcome.folder_status import (
    DAMAGE,
    ENDED_STATES,
    RunStatus,
    from_folder,
    has_begun,
    looked_at,
    of_local,
    unknown,
)
from orchestrator.scheduler.client import SlurmClient
from orchestrator.scheduler.jobs import Job, accounted, queue_of_user, queued, read_queue
from orchestrator.scheduler.shared_queue import SharedQueue
from orchestrator.clusters.slurm.trust import client_of
from orchestrator.lifecycle.signs.heartbeat import ENDED, read_beat

LOOK_TWICE_S = 1.5
MOMENT_S = 4.0
HELD = (
    "{}: a node could not start it, and it waits until you say `scontrol release {}`; `sinfo -R` may "
    "know which node, and why"
)


def find_runs(below: Path) -> list[Path]:
    """All run folders below a folder, those of sweeps included, oldest name first.

    A folder that may not be looked into counts as one: somebody else's run, as far as we can know.
    """
    found: list[Path] = []

    def search(folder: Path) -> None:
        try:
            within = {entry.name: entry for entry in os.scandir(folder)}
        except FileNotFoundError:  # removed while we look
            return
        except PermissionError:
            found.append(folder)
            return
        if "config.yaml" in within and "attempts" in within:
            found.append(folder)
            return
        for name, entry in sorted(within.items()):
            if entry.is_dir(follow_symlinks=False) and not name.startswith("."):
                search(Path(entry.path))

    if below.is_dir():
        search(below)
    return found


def expand(paths: Sequence[Path]) -> list[RunDir]:
    """The runs that paths name: a run, or all runs in a sweep's folder; none given: all in runs/.

    Raises:
        RunFolderError: a path that holds no run.
    """
    runs: list[RunDir] = []
    for path in paths or [Path.cwd() / "runs"]:
        found = find_runs(path)
        if not found and paths:
            RunDir(path).existing()
            raise RunFolderError(f"there is no run in {path}")
        runs += [RunDir(folder) for folder in found]
    return runs


def with_job(run: RunDir, status: RunStatus, job: Job) -> RunStatus:
    """The folder's word and the scheduler's, together; a job that lives is the later word."""
    status = replace(status, nodes=job.nodes)
    ended = status.state in ENDED_STATES
    if ended and not job.alive:
        cancelled = status.state == "stopped" and job.state == "CANCELLED"
        return replace(status, state="cancelled") if cancelled else status
    if not job.alive:
        from orchestrator.clusters.slurm.watch import ending

        state, culprit = ending(run, job)
        name = "cancelled" if job.state == "CANCELLED" else state.value
        who = None if culprit.rank is None else f"rank {culprit.rank} on {culprit.node}"
        return replace(status, state=name, reason=culprit.cause, culprit=who, boundary_age_s=None)
    if ended and job.waiting:
        said = (
            f"job {job.id} was queued once more after the run's end ({job.reason}), to end at once"
        )
        return replace(status, state="ending", reason=said)
    if job.waiting:
        reason = HELD.format(job.reason, job.id) if job.held else job.reason
        return replace(status, state="pending", reason=reason, boundary_age_s=None)
    name = "running" if has_begun(run, status) else "starting"
    if ended or job.state == "COMPLETING":
        name = "ending"
    reason = job.standstill or status.reason
    return replace(status, state=name, reason=reason, time_left_s=job.time_left_s)


def _beats(run: RunDir) -> list[str]:
    folder = run.attempt(max(0, run.attempts_made() - 1))
    return [read_beat(folder / name) for name in names_in(folder) if name.startswith("heartbeat-")]


def _by_hearts(runs: list[RunDir], found: dict[Path, RunStatus]) -> None:
    """Without a scheduler: whose heart beats, runs."""
    before: dict[Path, list[str]] = {}
    for run in runs:
        try:
            before[run.path] = _beats(run)
        except DAMAGE as error:
            found[run.path] = unknown(run, error)
    if any(before.values()):
        time.sleep(LOOK_TWICE_S)
    for run in runs:
        if run.path not in before:
            continue
        now = _beats(run)
        beating = any(a != b for a, b in zip(now, before[run.path], strict=False) if b != ENDED)
        state = "running" if beating else "unknown"
        found[run.path] = replace(found[run.path], state=state)


def _unasked(
    error: ClusterError, runs: list[RunDir], found: dict[Path, RunStatus]
) -> Iterator[str]:
    """Go by the hearts; yields why the scheduler was not asked."""
    yield str(error)
    _by_hearts([run for run in runs if _open(found[run.path])], found)


def _asked(client: SlurmClient, runs: list[RunDir], found: dict[Path, RunStatus]) -> Iterator[str]:
    """Fill in what one cluster's scheduler says; yields sentences about what it did not say.

    What squeue says holds whatever becomes of sacct, which is asked for those it has forgotten.
    """
    ids = sorted({str(found[run.path].job_id) for run in runs})
    try:
        jobs = _queue(client, ids, runs)
    except ClusterError as error:
        yield from _unasked(error, runs, found)
        return
    still = {str(found[run.path].job_id) for run in runs if _open(found[run.path])}
    gone = sorted(still - jobs.keys())
    silent = False
    try:
        past = (accounted(client, gone) if gone else None) or {}
    except ClusterError as error:
        yield str(error)
        past, silent = {}, True
    jobs.update({job_id: rows[-1] for job_id, rows in past.items()})
    for run in runs:
        job_id = str(found[run.path].job_id)
        if job_id in jobs:
            yield from _with_job(run, jobs[job_id], found)
        elif _open(found[run.path]) and silent:
            _by_hearts([run], found)
        elif _open(found[run.path]):
            reason = f"job {job_id} has left the queue without a result"
            found[run.path] = replace(found[run.path], state="lost", reason=reason)


def _queue(client: SlurmClient, ids: list[str], runs: list[RunDir]) -> dict[str, Job]:
    """What squeue knows of these jobs. For one's own, any shell's answer of a moment ago will do,
    unless their folders have changed since. Raises `SchedulerDown`.
    """
    own = os.getuid()
    if any(run.handle.stat().st_uid != own for run in runs):
        return queued(client, ids)
    now, clock = time.time(), time.monotonic()
    changes = [place.lstat().st_mtime for run in runs for place in (run.path, run.attempts)]
    newest = max(filter(lambda change: change <= now, changes), default=now)
    newer_than = max(clock - MOMENT_S, clock - (now - newest))
    jobs = read_queue(SharedQueue(client, *queue_of_user(own)).now(newer_than))
    return {job_id: job for job_id, job in jobs.items() if job_id in ids}


def _open(status: RunStatus) -> bool:
    return status.state not in ENDED_STATES


def _with_job(run: RunDir, job: Job, found: dict[Path, RunStatus]) -> Iterator[str]:
    """Take the scheduler's word on a run's job; finish what its batch script could not."""
    if not job.alive and _open(found[run.path]) or job.held and not _open(found[run.path]):
        from orchestrator.clusters.slurm.ending.settle import dismiss_held, settle_ended

        try:
            sentence = dismiss_held(run, job) if job.held else settle_ended(run, job)
        except DAMAGE as error:  # a scheduler that is silent again, a folder that is not whole
            yield f"{run.path}: {error}"
        else:
            if sentence is not None:
                yield sentence
                job = replace(job, state="CANCELLED" if job.held else "REQUEUED")
            found[run.path] = looked_at(run, partial(from_folder, run))
    if found[run.path].state not in UNREADABLE:
        status = found[run.path]
        found[run.path] = looked_at(run, partial(with_job, run, status, job))


def statuses(runs: Iterable[RunDir]) -> tuple[list[RunStatus], list[str]]:
    """Where all these runs stand, in their order, and sentences about what could not be asked.

    A run that cannot be read is a row of its own, `private` or `damaged`, and hides no other.
    """
    runs = list(runs)
    found: dict[Path, RunStatus] = {}
    clusters: dict[str | None, list[RunDir]] = {}
    for run in runs:
        found[run.path] = looked_at(run, partial(_first_look, run, clusters))
    sentences: list[str] = []
    for conf, members in clusters.items():
        try:
            client = client_of(members[0], conf)
        except ClusterError as error:
            sentences += _unasked(error, members, found)
        else:
            sentences += _asked(client, members, found)
    return [found[run.path] for run in runs], sentences


def _first_look(run: RunDir, clusters: dict[str | None, list[RunDir]]) -> RunStatus:
    """What can be said without a scheduler; a run that has one is put down for asking it."""
    status = from_folder(run.existing())
    if status.cluster == "local":
        return of_local(run, status)
    if status.job_id is None:
        return replace(status, state="lost", reason="it was never submitted")
    clusters.setdefault((run.read_handle() or {}).get("slurm_conf"), []).append(run)
    return status


def losses_so_far(status: RunStatus, points: int) -> list[float]:
    """A run's losses from its beginning to now; none where it cannot be read."""
    if status.state in UNREADABLE:
        return []
    return loss_course(RunDir(status.folder).metrics, points)
