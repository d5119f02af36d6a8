"""Points of a sweep as they lie on disk, and which of them show what accumulation does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orchestrator.lifecycle.checkpoint import WEIGHTS, complete
from orchestrator.report.metrics import read_metrics
from orchestrator.report.tables.sweep_table import SweptRun
from orchestrator.report.tables.time_and_memory import Pair
from orchestrator.run_folder.rundir import RunDir


def swept_run(
    run: RunDir, overrides: Mapping[str, str], *, result: Mapping[str, Any] | None = None
) -> SweptRun:
    """A run folder as a point.

    Args:
        overrides: those that vary in the sweep, key to value.
        result: in place of the run's own, where it could not start.
    """
    saved = complete(run.checkpoints) if run.checkpoints.is_dir() else []
    return SweptRun(
        overrides=overrides,
        folder=run.path,
        result=result or run.read_result(),
        updates=read_metrics(run.metrics).updates if run.metrics.exists() else (),
        plan=run.read_plan(),
        weights=saved[-1] / WEIGHTS if saved else None,
    )


def only_varying(all_overrides: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """Of each point's overrides those whose value is not the same in all points (all of them, when
    there is one point).

    >>> only_varying([["+a=1", "b=1"], ["+a=2", "b=1"]])
    [{'a': '1'}, {'a': '2'}]
    """
    tables = [dict(o.split("=", 1) for o in overrides if "=" in o) for overrides in all_overrides]
    keys = {key for table in tables for key in table}
    vary = {k for k in keys if len(tables) == 1 or len({table.get(k) for table in tables}) > 1}
    return [{k.lstrip("+"): v for k, v in table.items() if k in vary} for table in tables]


def accumulation_pairs(cells: Sequence[SweptRun]) -> list[Pair]:
    """Points that show what accumulation does: K = 1 beside the largest K, all else being equal.

    One pair at equal micro-batch and one at equal global batch, where the sweep has them.
    """
    done = [c for c in cells if c.finished and c.plan.get("micro_steps")]
    plain = [c for c in done if c.plan["micro_steps"] == 1]
    many = sorted(
        (c for c in done if c.plan["micro_steps"] > 1), key=lambda c: -c.plan["micro_steps"]
    )
    pairs: list[Pair] = []
    for title, figure in (
        ("equal micro-batch", lambda c: c.plan["micro_batches"][0][0]),
        ("equal global batch", lambda c: c.plan["global_batch"]),
    ):
        found = [(one, other) for other in many for one in plain if _alike(one, other, figure)]
        pairs += [Pair(title=title, one=found[0][0], many=found[0][1])] if found else []
    return pairs


def _alike(one: SweptRun, other: SweptRun, figure: Callable[[SweptRun], int]) -> bool:
    """Whether two points have the same figure and differ in their accumulation only."""
    differing = {k for k, v in other.overrides.items() if one.overrides.get(k) != v}
    alike = all(key.split(".")[0] == "accumulation" for key in differing)
    return alike and one.plan["ranks"] == other.plan["ranks"] and figure(one) == figure(other)
