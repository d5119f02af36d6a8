"""The end of a run: its state, the culprit of a failure, and result.json."""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED
from orchestrator.rundir.files import read_json, write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import Figures, read_metrics
from orchestrator.rundir.program_link import STOP_HANDLER

log = logging.getLogger(__name__)


class State(enum.Enum):
    """The state of a submission; of one that has ended, as in result.json."""

    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        return self in (State.FINISHED, State.STOPPED, State.FAILED)


NODE_WENT_AWAY = "the node went away: "
"""Prefix of the cause of a culprit that is a node."""
COMPUTED_WRONGLY = "computed wrongly in update"
"""In the cause of a rank whose result others do not confirm."""
NO_RESULT = "all ranks ended in order, but none wrote a result"
EXIT_CODES = {
    State.FINISHED: EXIT_FINISHED,
    State.FAILED: EXIT_FAILED,
    State.STOPPED: EXIT_STOPPED,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Culprit:
    """The rank that failed first.

    Attributes:
        cause: a sentence or a few.
        usage: the request was wrong, so another start would fail in the same way.
        hangs: other ranks waited for it in vain.
        complete: the cause names every rank already.
    """

    rank: int | None
    node: str
    cause: str
    log_tail: tuple[str, ...] = ()
    usage: bool = False
    hangs: bool = False
    complete: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "node": self.node,
            "cause": self.cause,
            "log_tail": list(self.log_tail),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptOutcome:
    """The end of an attempt, as its coordinator wrote it (`agent/coordinator.py`).

    Attributes:
        lost: the loss, where that is no fault of the job's: the run may begin again.
    """

    state: State
    culprit: Culprit | None
    lost: str | None


def failure_record(
    rank: int,
    node: str,
    cause: str,
    *,
    secondary: bool,
    usage: bool = False,
    replicas_differ: bool = False,
    excluded: bool = False,
    non_finite: bool = False,
    traceback: str = "",
) -> dict[str, Any]:
    """Return the record of a rank's failure, from which the root cause of the run is found.

    Args:
        secondary: caused by another rank's failure or difference.
        usage: see `Culprit`.
        replicas_differ: no rank's state may be saved, since it is unknown which is right.
        excluded: the rank computed wrongly, and no process may replace it.
        non_finite: the loss or a gradient was NaN or infinite.
    """
    return {
        "rank": rank,
        "node": node,
        "time": time.time(),
        "cause": cause,
        "usage": usage,
        "secondary": secondary,
        "replicas_differ": replicas_differ,
        "excluded": excluded,
        "non_finite": non_finite,
        "traceback": traceback,
    }


def write_failure(run: RunDir, attempt: int, failure: Mapping[str, Any]) -> None:
    """Write it into the attempt's folder. On a full disk, the agent still receives it."""
    try:
        write_json(run.failure(attempt, failure["rank"]), failure)
    except OSError as error:
        log.warning("the failure could not be recorded: %s", error)


def read_outcome(run: RunDir, attempt: int) -> AttemptOutcome | None:
    """Return how an attempt ended; None where no agent remained to write it."""
    record = read_json(run.outcome(attempt))
    return None if record is None else outcome_from_json(record)


def outcome_from_json(record: Mapping[str, Any]) -> AttemptOutcome:
    blamed: dict[str, Any] | None = record["culprit"]
    culprit = None
    if blamed is not None:
        values: dict[str, Any] = {**blamed, "log_tail": tuple(blamed["log_tail"])}
        culprit = Culprit(**values)
    return AttemptOutcome(state=State(record["state"]), culprit=culprit, lost=record["lost"])


def departure_note(why: str, updates: int | None = None, *, lost: bool = False) -> dict[str, Any]:
    """Return a departure note: the content of departure.json, and the first keys of decision.json.

    Args:
        updates: completed before it, if known.
        lost: the attempt was cut short by no stop, but by a loss: of srun, of a node, or of a rank
            that stood still for no fault of the job.
    """
    return {"why": why, "updates": updates, "time": time.time(), **({"lost": True} if lost else {})}


def note_departure(run: RunDir, attempt: int, why: str, updates: int | None = None) -> None:
    """Record that an attempt ended by a stop or a loss; an earlier reason stays."""
    earlier: dict[str, Any] = read_json(run.departure(attempt)) or {}
    note = departure_note(why, updates)
    write_json(run.departure(attempt), {**note, **earlier, "updates": updates})


def name_of_culprit(culprit: Mapping[str, Any]) -> str | None:
    """Return which rank failed first, and where; None if that is unknown.

    >>> name_of_culprit({"rank": 2, "node": "node1"})
    'rank 2 on node1'
    """
    rank, node = culprit.get("rank"), culprit.get("node")
    if rank is None:
        return None
    return f"rank {rank}" if node is None else f"rank {rank} on {node}"


def describe_culprit(culprit: Mapping[str, Any]) -> str:
    """Return who failed first and why, as one sentence.

    >>> describe_culprit({"rank": 2, "node": "node1", "cause": "killed by SIGKILL"})
    'rank 2 on node1 failed first: killed by SIGKILL'
    >>> describe_culprit({"rank": None, "node": None, "cause": "no rank started"})
    'the run failed: no rank started'
    """
    node, cause = culprit.get("node"), culprit.get("cause") or "cause unknown"
    if name := name_of_culprit(culprit):
        return f"{name} failed first: {cause}"
    return f"the run failed{'' if node is None else f' on {node}'}: {cause}"


CANCELLED_AT_ONCE = "cancelled at once, by a second interrupt or cancel --now"


def describe_end(result: Mapping[str, Any]) -> str:
    """Return the culprit of result.json, or how the run was cancelled, as one sentence; "" if
    neither is known.

    >>> culprit = {"rank": None, "node": "launcher", "cause": CANCELLED_AT_ONCE}
    >>> describe_end({"state": "stopped", "culprit": culprit})
    'the run was cancelled at once, by a second interrupt or cancel --now'
    """
    culprit: Mapping[str, Any] | None = result.get("culprit")
    if not culprit:
        return ""
    if result["state"] == State.STOPPED.value:  # not agreed by the ranks: it was cancelled
        return f"the run was {culprit['cause']}"
    return describe_culprit(culprit)


def write_result(
    run: RunDir, state: State, culprit: Culprit | None = None, *, remark: str = "", why: str = ""
) -> None:
    """Write result.json where rank 0 could not. For the run itself, and the holder of its lock.

    Args:
        why: of an orderly stop.
    """
    reason = {"why": why} if why else {}
    write_json(run.result, {**result_from_records(run, state, culprit, remark=remark), **reason})


def result_from_records(
    run: RunDir, state: State, culprit: Culprit | None = None, *, remark: str = ""
) -> dict[str, Any]:
    """Return result.json from what is known: the state, the culprit, and metrics.jsonl.

    Args:
        remark: why a failed run was not started again.
    """
    updates = read_metrics(run.metrics).updates
    last, figures = updates[-1] if updates else {}, Figures(updates)
    ends = [read_json(run.program_end(number)) for number in run.attempt_numbers()]
    program_s = sum(end["seconds"] for end in ends if end)
    return {
        "state": state.value,
        "updates": last.get("update", -1) + 1,
        "samples": figures.total("samples") or 0,
        "loss": last.get("loss"),
        "metrics": {},
        "weights_sha256": None,
        "peak_memory_bytes": [],
        "collectives": figures.total("collectives"),
        "bytes_on_wire": figures.total("bytes_on_wire"),
        "seconds": program_s or figures.total("update_s") or 0.0,
        "restarts": run.restarts(),
        "culprit": {**culprit.to_json(), "remark": remark} if culprit else None,
    }


def describe_stop(run: RunDir) -> str:
    """Return what the run does when it is asked to stop, as a phrase that follows its name.

    A program gets its signal; its ranks stop together only if all of them have called
    `should_stop` (or use `run.windows`) in this attempt.
    """
    attempt = run.latest_attempt
    if run.outcome(attempt).exists():
        return "has ended this attempt, and begins no other one"
    plan = run.read_plan()
    program: dict[str, Any] | None = plan.get("program")
    if program is None:
        return "stops at its next update boundary, with a checkpoint"
    folder = run.attempt(attempt)
    if all((folder / STOP_HANDLER.format(rank)).exists() for rank in range(int(plan["ranks"]))):
        return "stops once all its ranks are done with the same update, and saves as it does then"
    signal = f"SIG{program.get('stop_signal', 'TERM')}"
    return f"gets {signal} on every rank; what it does then, and whether it saves, is its own"
