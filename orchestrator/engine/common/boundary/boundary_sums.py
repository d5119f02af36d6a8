"""What the ranks' sums say of an update, in the words of its report: the same in both engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.engine.common.boundary.packed_sums import NEWCOMERS, STOP, Trailer


def said_by(totals: Trailer, metric_names: Sequence[str]) -> dict[str, Any]:
    """`loss`, `weight`, `metrics`, `stop_requested` and `newcomers` of a `BoundaryReport`.

    Args:
        totals: of all ranks; its weight is above 0.
        metric_names: in the order in which metrics travel.
    """
    weight = totals.weight.value
    metrics = zip(metric_names, totals.metrics, strict=True)
    return {
        "loss": totals.loss.value / weight,
        "weight": weight,
        "metrics": {name: total.value / weight for name, total in metrics},
        "stop_requested": totals.flags[STOP] > 0,
        "newcomers": totals.flags[NEWCOMERS] > 0,
    }
