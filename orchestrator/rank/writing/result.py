"""What rank 0 writes into result.json when a run ends well, or is stopped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.engine.api import Engine
from orchestrator.plan.plan import Plan
from orchestrator.rank.loop import Outcome
from orchestrator.rank.writing.survival_notes import WHO
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import read_metrics


def memory_of_ranks(engine: Engine) -> dict[str, list[int]]:
    """Bytes by what they are for, and their peak, a number for each rank. Collective."""
    mine = {**engine.memory_bytes(), "peak": engine.peak_memory_bytes()}
    rows = engine.gather([float(size) for size in mine.values()])
    return {name: [int(row[place]) for row in rows] for place, name in enumerate(mine)}


def result_of(
    run: RunDir,
    outcome: Outcome,
    engine: Engine,
    planned: Plan,
    *,
    seconds: float,
    memory: dict[str, list[int]],
    unwritten: Mapping[str, Any],
) -> dict[str, Any]:
    """The values of result.json.

    Args:
        unwritten: changes of the group after the last update, which no line has.
        memory: of all ranks; `memory` in the result is that of the largest, in bytes.
    """
    history = read_metrics(run.metrics).updates  # of all attempts
    changes = {
        key: [record[key] for record in (*history, unwritten) if key in record] for key in WHO
    }
    outcome.collectives = sum(record.get("collectives", 0) for record in history)
    outcome.bytes_on_wire = sum(record.get("bytes_on_wire", 0) for record in history)
    return {
        "state": outcome.state,
        "updates": outcome.updates,
        "samples": outcome.samples,
        "loss": outcome.loss,
        "metrics": outcome.evaluation,
        "optimizer": engine.optimizer_used(),
        "weights_sha256": engine.weights_sha256(),
        "peak_memory_bytes": memory["peak"],
        "memory": {name: max(sizes) for name, sizes in memory.items()},
        "collectives": outcome.collectives,
        "bytes_on_wire": outcome.bytes_on_wire,
        "seconds": seconds,
        "planned_updates": planned.updates,
        "planned_collectives_per_update": planned.traffic.collectives,
        "culprit": None,
        "restarts": run.restarts(),
        **{key: notes for key, notes in changes.items() if notes},
    }
