"""The status of a run by its folder alone: its newest records and its lock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.errors import ClusterError, RunFolderError
from orchestrator.rundir.files import await_readable, read_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.generations import GenerationRecord
from orchestrator.rundir.lock import is_locked
from orchestrator.rundir.metrics import Figures, recent_pace, recent_records, updates_of
from orchestrator.rundir.outcome import name_of_culprit
from orchestrator.rundir.restarts import describe_pause
from orchestrator.rundir.warnings import read_warnings

ENDED_STATES = ("finished", "failed", "stopped", "cancelled", "pruned")
OVER = (*ENDED_STATES, "lost")  # no process computes it any more
UNREADABLE = ("private", "damaged")
# Exceptions of reading a file whose content no run writes.
DAMAGE = (
    RunFolderError,
    ClusterError,
    OSError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    RecursionError,
    OverflowError,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """One run. None: not known, or it does not apply.

    Attributes:
        state: pending, starting, running, ending, finished, stopped, failed, cancelled, lost
            (its launcher ended without a result), pruned (by a search), unknown (the scheduler
            does not answer), private (readable by its owner), damaged.
        evaluation: the latest held-out figures, where they are recent.
        seconds_left: until the last update, at the recent pace; time_left_s: of the job's limit.
        boundary_age_s: since the last update boundary.
        restarts: attempts that began by themselves; what a person asked for (resume) is none.
        survived: how often the latest attempt's ranks agreed on a smaller group; rejoined: how
            many ranks were let in again.
        lost_updates: over all attempts; why: of the latest restart.
        reason: why it is pending or unknown, when its next restart follows, why it failed, or why
            it cannot be read.
        culprit: which rank failed first, and on which node.
        program: what runs, where it is a training program as it is.
        tags, note: what a person calls it (`run.tags`, `run.note`).
        warnings: of the latest attempt's ranks, each once, the latest last.
    """

    folder: Path
    state: str
    cluster: str
    job_id: str | None = None
    nodes: str = ""
    updates: int = 0
    total: int | None = None
    loss: float | None = None
    learning_rate: float | None = None
    evaluation: dict[str, Any] = field(default_factory=dict[str, Any])
    samples_per_second: float | None = None
    seconds_left: float | None = None
    boundary_age_s: float | None = None
    attempts: int = 0
    restarts: int = 0
    survived: int = 0
    rejoined: int = 0
    lost_updates: int = 0
    why: str | None = None
    time_left_s: float | None = None
    reason: str | None = None
    culprit: str | None = None
    program: str | None = None
    tags: list[str] = field(default_factory=list[str])
    note: str | None = None
    warnings: list[str] = field(default_factory=list[str])

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "folder": str(self.folder)}


def kind_of(run: RunDir, handle: dict[str, Any] | None = None) -> str:
    """Return the kind of cluster that a run was placed on; see `cluster.kind`."""
    if handle is None:
        handle = run.read_handle() or {}
    return str(handle.get("kind") or run.read_submission().get("cluster") or "local")


def end_of(run: RunDir, result: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the state of a run that has ended, and why, if that is known."""
    state, culprit = str(result["state"]), result.get("culprit") or {}
    why = culprit.get("cause") or result.get("why")
    if state == "stopped" and culprit:  # it was not agreed: the job was cancelled
        return "cancelled", why
    if state == "stopped" and (pruned := read_json(run.pruned)):
        return "pruned", why or pruned.get("why")
    return state, why


def from_folder(run: RunDir) -> RunStatus:
    """Return the status by the folder alone. Raises one of `DAMAGE` if the folder is damaged."""
    plan, result, handle = run.read_plan(), run.read_result(), run.read_handle() or {}
    submission = run.read_submission()
    state, reason = ("running", describe_pause(run)) if result is None else end_of(run, result)

    records = recent_records(run.metrics)
    updates = updates_of(records)
    last = updates[-1] if updates else {}
    evaluations = [record["evaluation"] for record in records if record.get("evaluation")]
    pace, total = recent_pace(updates), plan.get("updates")
    done = int(result["updates"]) if result else last.get("update", -1) + 1
    age_s: float | None = None
    if result is None:
        with suppress(FileNotFoundError):
            age_s = max(0.0, time.time() - run.metrics.stat().st_mtime)

    attempts, notes = run.attempts_made(), run.restarts()
    resumed = {note["attempt"] for note in notes if note["asked"]}
    resumed |= {int(entry["attempt"]) for entry in run.read_resumes()}
    generations = list(GenerationRecord(run.attempt(attempts - 1)).since()) if attempts else []
    return RunStatus(
        folder=run.path,
        state=state,
        cluster=kind_of(run, handle),
        job_id=handle.get("job_id"),
        updates=done,
        total=total,
        loss=last.get("loss"),
        learning_rate=last.get("learning_rate"),
        evaluation=dict(evaluations[-1]) if evaluations else {},
        samples_per_second=Figures(updates).samples_per_second,
        seconds_left=(total - done) * pace if total and pace and not result else None,
        boundary_age_s=age_s,
        attempts=attempts,
        # attempts that began by themselves: neither the first, nor one by `resume`
        restarts=max(0, attempts - 1 - len(resumed & set(range(1, attempts)))),
        survived=sum(1 for generation in generations if generation.get("gone")),
        rejoined=sum(len(generation.get("joined", ())) for generation in generations),
        lost_updates=sum(int(note["lost_updates"]) for note in notes),
        why=next((str(n["why"]) for n in reversed(notes) if not n["asked"]), None),
        reason=reason,
        culprit=name_of_culprit((result or {}).get("culprit") or {}),
        tags=list(submission.get("tags") or ()),
        note=submission.get("note"),
        program=" ".join(map(str, plan["program"]["argv"])) if plan.get("program") else None,
        warnings=[w.text for w in read_warnings(run.attempt(attempts - 1))] if attempts else [],
    )


def unknown(run: RunDir, error: BaseException) -> RunStatus:
    """Return the status of a run that cannot be read: private or damaged, and why."""
    refused = next((e for e in (error, error.__cause__) if isinstance(e, PermissionError)), None)
    if refused is not None:
        why = f"{refused.filename or run.path} may be read by its owner only"
        return RunStatus(folder=run.path, state="private", cluster="", reason=why)
    why = str(error)
    if not isinstance(error, RunFolderError | ClusterError):
        what = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError):
            what = f"{error.filename}: {error.strerror}"
        why = f"a file of it has content that no run writes ({what})"
    return RunStatus(folder=run.path, state="damaged", cluster="", reason=why)


def status_or_damage(run: RunDir, read: Callable[[], RunStatus]) -> RunStatus:
    """Return `read()`; a run that cannot be read, nor in a moment, has a status that says why."""
    try:
        return await_readable(read, brief=True)
    except DAMAGE as error:
        return unknown(run, error)


def await_run(run: RunDir, *, existed: bool) -> None:
    """Wait until a run can be read, for some time; see `await_readable`."""

    def read() -> RunStatus:
        run.config.stat()
        return from_folder(run)

    with suppress(*DAMAGE):
        await_readable(read, existed=existed)


def correct_by_lock(run: RunDir, status: RunStatus) -> RunStatus:
    """Return a local run's status, corrected by its lock: a run that nothing holds is lost."""
    if status.state in ENDED_STATES:
        return status
    if not is_locked(run):
        if run.read_result() is not None:  # it has ended since `status` was read
            return from_folder(run)
        return replace(status, state="lost", reason="its launcher is gone, without a result")
    return status if has_begun(run, status) else replace(status, state="starting")


def has_begun(run: RunDir, status: RunStatus) -> bool:
    """Return whether it trains; of a program that reports nothing, whether it was started."""
    return bool(status.updates) or (status.attempts > 0 and bool(run.read_plan().get("program")))


def mark_unknown(runs: Sequence[RunDir], statuses: dict[Path, RunStatus], why: str) -> None:
    """Mark runs that have no recorded end as unknown, with the reason."""
    for run in runs:
        if statuses[run.path].state not in ENDED_STATES:
            statuses[run.path] = replace(statuses[run.path], state="unknown", reason=why)


def find_runs(below: Path) -> list[Path]:
    """Return all run folders below a folder, those of sweeps included, by name: 0, 1, …, 10.

    A folder that cannot be read counts as one: it may be another account's run, or its disk may not
    answer. So does one that lost its config.yaml, which is written before plan.json.
    """
    paths: list[Path] = []

    def refused(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            paths.append(Path(error.filename))

    for folder, folders, files in os.walk(below, onerror=refused):
        if "attempts" in folders and not {"config.yaml", "plan.json"}.isdisjoint(files):
            paths.append(Path(folder))
            folders.clear()
        folders[:] = sorted(
            (name for name in folders if not name.startswith(".")),
            key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name),
        )
    return paths
