"""How a run ends: its exit code, and result.json where rank 0 could not write it.

It could not when it failed, or was stopped before it began.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchestrator.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED
from orchestrator.outcome.run_state import Culprit, State
from orchestrator.report.metrics import read_metrics
from orchestrator.report.summary import total
from orchestrator.run_folder.rundir import RunDir

EXIT_CODES = {
    State.FINISHED: EXIT_FINISHED,
    State.FAILED: EXIT_FAILED,
    State.STOPPED: EXIT_STOPPED,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a followed run ended; PENDING for one that was only queued."""

    run: RunDir
    state: State
    exit_code: int
    culprit: Culprit | None = None


def write_end(
    run: RunDir, state: State, culprit: Culprit | None = None, *, remark: str = ""
) -> None:
    """Write result.json as `end_of` says it. For the run itself, and for who holds its lock."""
    run.write_own(run.result, end_of(run, state, culprit, remark=remark))


def end_of(
    run: RunDir, state: State, culprit: Culprit | None = None, *, remark: str = ""
) -> dict[str, Any]:
    """An end from what is known: the state, the culprit, the updates in metrics.jsonl, and how long
    a program ran, all attempts together.

    Args:
        remark: why a failed run was not started again, where that needs saying.
    """
    updates = read_metrics(run.metrics).updates
    last = updates[-1] if updates else {}
    told = [run.read(run.program_end(number)) for number in run.attempt_numbers()]
    of_program = sum(end["seconds"] for end in told if end)
    return {
        "state": state.value,
        "updates": last.get("update", -1) + 1,
        "samples": total(updates, "samples") or 0,
        "loss": last.get("loss"),
        "metrics": {},
        "weights_sha256": None,
        "peak_memory_bytes": [],
        "collectives": total(updates, "collectives"),
        "bytes_on_wire": total(updates, "bytes_on_wire"),
        "seconds": of_program or total(updates, "update_s") or 0.0,
        "restarts": run.restarts(),
        "culprit": {**culprit.to_json(), "remark": remark} if culprit else None,
    }
