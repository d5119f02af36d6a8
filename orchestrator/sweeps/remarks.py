"""What is said below the table of a sweep: which times were disturbed, and why weights differ: by
other updates, or only by another order of additions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.report.tables.sweep_table import SweptRun, names
from orchestrator.run_folder.rundir import RunDir
from orchestrator.runs.resuming.rules import Kind, changes
from orchestrator.sweeps.local.beside import timed_beside

MAGNIFIES = (
    "Adam in float32 magnifies rounding where a gradient is nearly zero, so weights differ by more "
    "than the updates do; optimizer=sgd or train.precision=float64 shows the exactness."
)
OF_THE_PLAN = {
    "global_batch": "the global batch", "updates": "the number of updates",
    "schedule": "the learning rates",
}  # fmt: skip


def remarks(cells: Sequence[SweptRun]) -> list[str]:
    """What has to be known to read times, and the differences from the first finished point."""
    beside = timed_beside(cells)
    return [*([beside] if beside else []), *_of_weights(cells)]


def _of_weights(cells: Sequence[SweptRun]) -> list[str]:
    if any(cell.plan.get("program") for cell in cells):  # whose weights are their own
        return []
    finished = [(n, cell) for n, cell in zip(names(cells), cells, strict=True) if cell.finished]
    if len(finished) < 2:
        return []
    (_, first), *rest = finished
    digest = (first.result or {}).get("weights_sha256")
    others = [
        (name, cell)
        for name, cell in rest
        if digest is None or (cell.result or {}).get("weights_sha256") != digest
    ]
    reference = RunDir(first.folder).read_config()
    unlike: dict[str, list[str]] = {}
    for name, cell in others:
        causes = _causes(first, cell, reference, RunDir(cell.folder).read_config())
        if causes:
            unlike[name] = causes
    said: list[str] = []
    if unlike:
        causes = ", ".join(dict.fromkeys(cause for found in unlike.values() for cause in found))
        points = ", ".join(unlike)
        said.append(
            f"Weights of point{'s' * (len(unlike) > 1)} {points} differ from the first finished "
            f"point's because other updates were made ({causes}), not by rounding."
        )
    if len(unlike) < len(others) and _magnifies(reference):
        said.append(MAGNIFIES)
    return said


def _causes(
    one: SweptRun, other: SweptRun, before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[str]:
    """What makes two points compute something else; empty where only the split differs."""
    keys = [
        change.key
        for change in changes(before, after)
        if change.kind is Kind.NUMBERS and not change.key.startswith("run.")
    ]
    plans = [OF_THE_PLAN[n] for n in OF_THE_PLAN if one.plan.get(n) != other.plan.get(n)]
    return [*keys, *plans]


def _magnifies(config: Mapping[str, Any]) -> bool:
    """Whether rounding grows in this optimizer, so that weights differ more."""
    optimizer, train = config.get("optimizer", {}), config.get("train", {})
    return "adam" in str(optimizer).lower() and train.get("precision") != "float64"
