"""Where a run stands by its folder alone: what was written last, and whether its launcher lives."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any

from orchestrator.errors import ClusterError, RunFolderError
from orchestrator.lifecycle.survival.record import GenerationRecord
from orchestrator.outcome.lock_holder import is_held
from orchestrator.report.metrics import Record
from orchestrator.report.metrics_glance import recent_records, updates_of
from orchestrator.report.summary import seconds_per_update
from orchestrator.run_folder.rundir import RESUMED, RunDir
from orchestrator.run_warnings import read_warnings

ENDED_STATES = ("finished", "failed", "stopped", "cancelled", "pruned")
OVER = (*ENDED_STATES, "lost")  # nobody computes it any more
STATES = (
    *ENDED_STATES, "pending", "starting", "running", "ending", "lost", "unknown", "private",
    "damaged",
)  # fmt: skip
_TYPES: dict[str, Any] = {
    "Path": Path, "str": str, "int": int, "dict[str, Any]": dict, "list[str]": list,
    "str | None": (str, NoneType), "int | None": (int, NoneType),
    "float | None": (int, float, NoneType),
}  # fmt: skip
# What reading a file raises that holds something else than a run writes.
DAMAGE = (
    RunFolderError, ClusterError, OSError, ValueError, TypeError, KeyError, IndexError,
    AttributeError, RecursionError, OverflowError,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """One run. None: not known, or it does not apply.

    Attributes:
        state: pending, starting, running, ending, finished, stopped, failed, cancelled, lost
            (it left without a result), pruned (a search has stopped it), unknown (the scheduler
            does not answer and no heart beats), private (its owner's alone), damaged.
        evaluation: the latest held-out figures, where they are recent.
        seconds_left: until the last update, at the recent pace; time_left_s: of the job's limit.
        boundary_age_s: since the last update boundary.
        restarts: attempts that began by themselves; what a person asked for (resume) is none.
        survived: how often the latest attempt's ranks agreed on a smaller group; came_back: how
            many ranks were let in again.
        lost_updates: over all attempts; why: of the latest restart.
        reason: why it is pending, why it failed, or why it cannot be read.
        culprit: which rank failed first, and on which node.
        program: what runs, where it is a training program as it is.
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
    came_back: int = 0
    lost_updates: int = 0
    why: str | None = None
    time_left_s: float | None = None
    reason: str | None = None
    culprit: str | None = None
    program: str | None = None
    warnings: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        """What was read from files may be of any type. Raises `RunFolderError` when it is wrong."""
        for name, kinds in _kinds():
            if not isinstance(value := getattr(self, name), kinds):
                raise RunFolderError(f"{self.folder} is damaged: its {name} is {value!r:.60}")
        if self.state not in STATES:
            raise RunFolderError(f"{self.folder} is damaged: its state is {self.state!r:.60}")

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "folder": str(self.folder)}


@functools.cache
def _kinds() -> list[tuple[str, Any]]:
    """What each of them may be."""
    return [(place.name, _TYPES[str(place.type)]) for place in fields(RunStatus)]


def recent_updates(run: RunDir) -> list[Record]:
    """The latest updates of the latest attempt, however long metrics.jsonl is."""
    return updates_of(recent_records(run.metrics))


def _age_s(run: RunDir) -> float | None:
    """Seconds since metrics.jsonl grew. Nothing is written to find out: a watcher never does."""
    try:
        return max(0.0, time.time() - run.metrics.stat().st_mtime)
    except FileNotFoundError:
        return None


def kind_of(run: RunDir) -> str:
    """The kind of cluster that a run was placed on; see `cluster.kind`."""
    return _kind(run, run.read_handle() or {})


def _kind(run: RunDir, handle: dict[str, Any]) -> str:
    return str(handle.get("kind") or run.read_submission().get("cluster") or "local")


def from_folder(run: RunDir) -> RunStatus:
    """What the folder alone says. Raises one of `DAMAGE` where it holds what no run writes."""
    plan = run.read_plan()
    result = run.read_result()
    handle = run.read_handle() or {}
    return RunStatus(
        folder=run.path,
        cluster=_kind(run, handle),
        job_id=handle.get("job_id"),
        program=" ".join(map(str, plan["program"]["words"])) if plan.get("program") else None,
        **_end(run, result),
        **_progress(run, plan.get("updates"), result),
        **_attempts(run),
    )


def _end(run: RunDir, result: dict[str, Any] | None) -> dict[str, Any]:
    """What result.json says, where there is one."""
    if result is None:
        return {"state": "running"}
    pruned = run.read(run.pruned) if result["state"] == "stopped" else None
    culprit: dict[str, Any] = result.get("culprit") or {}
    return {
        "state": _state_of(result, pruned),
        "reason": culprit.get("cause") or result.get("why") or (pruned or {}).get("why"),
        "culprit": _named(culprit),
    }


def _progress(run: RunDir, total: int | None, result: dict[str, Any] | None) -> dict[str, Any]:
    """How far it has come, and how fast, by its latest records."""
    records = recent_records(run.metrics)
    updates = updates_of(records)
    last = updates[-1] if updates else {}
    evaluations = [record["evaluation"] for record in records if record.get("evaluation")]
    samples = [r["samples"] for r in updates if r.get("samples")]
    pace, ended = seconds_per_update(updates), result is not None
    done = int(result["updates"]) if result else (last["update"] + 1 if last else 0)
    return {
        "updates": done,
        "total": total,
        "loss": last.get("loss"),
        "learning_rate": last.get("learning_rate"),
        "evaluation": dict(evaluations[-1]) if evaluations else {},
        "samples_per_second": sum(samples) / len(samples) / pace if samples and pace else None,
        "seconds_left": (total - done) * pace if total and pace and not ended else None,
        "boundary_age_s": None if ended else _age_s(run),
    }


def _attempts(run: RunDir) -> dict[str, Any]:
    """What became of its starts."""
    made, notes = run.attempts_made(), run.restarts()
    record = GenerationRecord(run.attempt(made - 1)) if made else None
    return {
        "attempts": made,
        "restarts": _restarts(run, notes, made),
        "survived": len(record.losses()) if record else 0,
        "came_back": len(record.came()) if record else 0,
        "lost_updates": sum(int(note["lost_updates"]) for note in notes),
        "why": next((str(n["why"]) for n in reversed(notes) if n["why"] != RESUMED), None),
        "warnings": _warnings(run, made),
    }


def _named(culprit: dict[str, Any]) -> str | None:
    rank = culprit.get("rank")
    return None if rank is None else f"rank {rank} on {culprit.get('node')}"


def _state_of(result: dict[str, Any], pruned: dict[str, Any] | None) -> str:
    """An agreed stop has no culprit; one that has was not agreed: the job was cancelled."""
    if result["state"] != "stopped":
        return str(result["state"])
    return "cancelled" if result.get("culprit") else "pruned" if pruned else "stopped"


def _restarts(run: RunDir, notes: list[dict[str, Any]], made: int) -> int:
    """Attempts that began by themselves: neither the first, nor one that a person asked for."""
    asked = {note["attempt"] for note in notes if note["why"] == RESUMED}
    asked |= {int(entry["attempt"]) for entry in run.read_resumes()}
    return max(0, made - 1 - len(asked & set(range(1, made))))


def _warnings(run: RunDir, attempts: int) -> list[str]:
    """What the ranks of the latest attempt warned of, the latest last."""
    return [w.told for w in read_warnings(run.attempt(attempts - 1))] if attempts else []


def unknown(run: RunDir, error: BaseException) -> RunStatus:
    """The row of a run that cannot be read: somebody else's, or damaged, and why."""
    refused = next((e for e in (error, error.__cause__) if isinstance(e, PermissionError)), None)
    if refused is not None:
        why = f"{refused.filename or run.path} may be read by its owner only"
        return RunStatus(folder=run.path, state="private", cluster="", reason=why)
    known = isinstance(error, RunFolderError | ClusterError)
    why = str(error) if known else f"a file of it holds what no run writes ({_words(error)})"
    return RunStatus(folder=run.path, state="damaged", cluster="", reason=why)


def _words(error: BaseException) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    return f"{type(error).__name__}: {error}"


def looked_at(run: RunDir, look: Callable[[], RunStatus]) -> RunStatus:
    """What `look` finds; a run that cannot be read becomes a row that says so, and hides no
    other.
    """
    try:
        return look()
    except DAMAGE as error:
        return unknown(run, error)


def of_held(run: RunDir, status: RunStatus) -> RunStatus:
    """The folder's word on a run that its launcher holds, and the lock's."""
    if status.state in ENDED_STATES:
        return status
    if not is_held(run):
        return replace(status, state="lost", reason="its launcher is gone, without a result")
    return status if has_begun(run, status) else replace(status, state="starting")


def has_begun(run: RunDir, status: RunStatus) -> bool:
    """Whether it trains; of a program that says nothing, whether it was started."""
    return bool(status.updates) or (status.attempts > 0 and bool(run.read_plan().get("program")))
