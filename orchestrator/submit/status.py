"""Where runs stand, from any shell at any time: their folders, and one question to the scheduler.

For any number of runs there is one squeue call a cluster, and one sacct call where squeue has
forgotten a job. Where neither answers, the folders tell: a result, or hearts that beat.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.errors import ClusterError, RunFolderError
from orchestrator.report.metrics import Record, only_warns
from orchestrator.report.summary import seconds_per_update
from orchestrator.rundir import RunDir, read_json
from orchestrator.submit.slurm_client import NoClient, SlurmClient
from orchestrator.submit.slurm_jobs import Job, accounted, queued
from orchestrator.worker.heartbeat import ENDED, read_beat

RECENT_BYTES = 64 * 1024
LOOK_TWICE_S = 1.5
ENDED_STATES = ("finished", "failed", "stopped")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """One run. None: not known, or it does not apply.

    Attributes:
        state: pending, starting, running, ending, finished, stopped, failed, cancelled, lost
            (it left without a result), unknown (the scheduler does not answer and no heart beats).
        boundary_age_s: since the last update boundary, by the clock of the run's file system.
        restarts, lost_updates: over all attempts; why: of the latest restart.
        reason: why it is pending, or why it failed.
    """

    folder: Path
    state: str
    cluster: str
    job_id: str | None = None
    nodes: str = ""
    updates: int = 0
    total: int | None = None
    samples_per_second: float | None = None
    boundary_age_s: float | None = None
    restarts: int = 0
    lost_updates: int = 0
    why: str | None = None
    time_left_s: float | None = None
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "folder": str(self.folder)}


def find_runs(below: Path) -> list[Path]:
    """All run folders below a folder, those of sweeps included, oldest name first."""
    found: list[Path] = []

    def search(folder: Path) -> None:
        if (folder / "config.yaml").is_file() and (folder / "attempts").is_dir():
            found.append(folder)
            return
        for entry in sorted(os.scandir(folder), key=lambda e: e.name):
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
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


def recent_updates(run: RunDir) -> list[Record]:
    """The latest updates in metrics.jsonl, however long it is."""
    try:
        with run.metrics.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - RECENT_BYTES))
            lines = file.read().split(b"\n")[1 if size > RECENT_BYTES else 0 : -1]
    except FileNotFoundError:
        return []
    records: list[Record] = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # a killed writer's last line
            continue
        if "evaluation" not in record and "update" in record and not only_warns(record):
            records.append(record)
    last = records[-1].get("attempt", 0) if records else 0
    return [record for record in records if record.get("attempt", 0) == last]


def _age_s(run: RunDir) -> float | None:
    """Seconds since metrics.jsonl grew, both times by its own file system's clock."""
    mark = run.path / ".clock"
    if not run.metrics.exists():
        return None
    written = run.metrics.stat().st_mtime
    try:
        mark.touch(mode=0o600)
        os.utime(mark)
        now = mark.stat().st_mtime
    except OSError:  # not ours to write in
        now = time.time()
    return max(0.0, now - written)


def from_folder(run: RunDir) -> RunStatus:
    """What the folder alone says."""
    plan = run.read_plan()
    result = run.read_result()
    handle: dict[str, Any] = read_json(run.handle) or {}
    updates = recent_updates(run)
    pace = seconds_per_update(updates)
    samples = [r["samples"] for r in updates if r.get("samples")]
    attempts = run.attempts_made()
    notes = run.restarts()
    culprit: dict[str, Any] = (result or {}).get("culprit") or {}
    ended = result is not None
    kind = str(handle.get("kind") or (read_json(run.submission) or {}).get("cluster") or "local")
    return RunStatus(
        folder=run.path,
        state=str(result["state"]) if result else "running",
        cluster=kind,
        job_id=handle.get("job_id"),
        updates=result["updates"] if result else (updates[-1]["update"] + 1 if updates else 0),
        total=plan.get("updates"),
        samples_per_second=sum(samples) / len(samples) / pace if samples and pace else None,
        boundary_age_s=None if ended else _age_s(run),
        restarts=max(0, attempts - 1),
        lost_updates=sum(int(note["lost_updates"]) for note in notes),
        why=str(notes[-1]["why"]) if notes else None,
        reason=culprit.get("cause"),
    )


def is_held(run: RunDir) -> bool:
    """Whether a local launcher holds the run."""
    try:
        descriptor = os.open(run.lock, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _local(run: RunDir, status: RunStatus) -> RunStatus:
    if status.state in ENDED_STATES:
        return status
    if not is_held(run):
        return replace(status, state="lost", reason="its launcher is gone, without a result")
    return status if status.updates else replace(status, state="starting")


def with_job(run: RunDir, status: RunStatus, job: Job) -> RunStatus:
    """The folder's word and the scheduler's, together."""
    status = replace(status, nodes=job.nodes)
    if status.state in ENDED_STATES:
        cancelled = status.state == "stopped" and job.state == "CANCELLED"
        return replace(status, state="cancelled") if cancelled else status
    if not job.alive:
        from orchestrator.submit.slurm_watch import ending

        state, culprit = ending(run, job)
        name = "cancelled" if job.state == "CANCELLED" else state.value
        return replace(status, state=name, reason=culprit.cause, boundary_age_s=None)
    if job.waiting:
        return replace(status, state="pending", reason=job.reason, boundary_age_s=None)
    name = "ending" if job.state == "COMPLETING" else "running" if status.updates else "starting"
    return replace(status, state=name, time_left_s=job.time_left_s)


def _beats(run: RunDir) -> list[str]:
    folder = run.attempt(max(0, run.attempts_made() - 1))
    return [read_beat(path) for path in sorted(folder.glob("heartbeat-*"))]


def _by_hearts(runs: list[RunDir], found: dict[Path, RunStatus]) -> None:
    """Without a scheduler: whose heart beats, runs."""
    before = {run.path: _beats(run) for run in runs}
    if any(before.values()):
        time.sleep(LOOK_TWICE_S)
    for run in runs:
        now = _beats(run)
        beating = any(a != b for a, b in zip(now, before[run.path], strict=False) if b != ENDED)
        state = "running" if beating else "unknown"
        found[run.path] = replace(found[run.path], state=state)


def _asked(conf: str | None, runs: list[RunDir], found: dict[Path, RunStatus]) -> Iterator[str]:
    """Fill in what one cluster's scheduler says; yields sentences about what it did not say."""
    ids = {str(found[run.path].job_id): run for run in runs}
    client = None
    try:
        client = SlurmClient(conf)
        jobs = queued(client, ids)
        gone = [job_id for job_id in ids if job_id not in jobs]
        past = accounted(client, gone) if gone else {}
    except (NoClient, ClusterError) as error:
        yield str(error)
        _by_hearts([r for r in runs if found[r.path].state not in ENDED_STATES], found)
        return
    jobs.update({job_id: rows[-1] for job_id, rows in (past or {}).items()})
    for job_id, run in ids.items():
        status = found[run.path]
        if job_id in jobs:
            found[run.path] = with_job(run, status, jobs[job_id])
        elif status.state not in ENDED_STATES:
            reason = f"job {job_id} has left the queue without a result"
            found[run.path] = replace(status, state="lost", reason=reason)


def statuses(runs: Iterable[RunDir]) -> tuple[list[RunStatus], list[str]]:
    """Where all these runs stand, in their order, and sentences about what could not be asked."""
    runs = list(runs)
    found = {run.path: from_folder(run) for run in runs}
    clusters: dict[str | None, list[RunDir]] = {}
    sentences: list[str] = []
    for run in runs:
        status = found[run.path]
        if status.cluster == "local":
            found[run.path] = _local(run, status)
        elif status.job_id is None:
            found[run.path] = replace(status, state="lost", reason="it was never submitted")
        else:
            conf = (read_json(run.handle) or {}).get("slurm_conf")
            clusters.setdefault(conf, []).append(run)
    for conf, members in clusters.items():
        sentences += _asked(conf, members, found)
    return [found[run.path] for run in runs], sentences
