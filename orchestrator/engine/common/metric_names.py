"""The metrics that a loss gives are those that its job declares."""

from __future__ import annotations

from collections.abc import Collection

from orchestrator.errors import JobError, did_you_mean


def check_metric_names(given: Collection[str], declared: Collection[str]) -> None:
    """Raise `JobError` for a metric that was not declared, or that is missing."""
    for name in given:
        if name not in declared:
            raise JobError(
                f"Loss.metrics has '{name}', which the job's metric_names do not declare"
                f"{did_you_mean(name, declared)}"
            )
    for name in declared:
        if name not in given:
            raise JobError(f"Loss.metrics lacks '{name}', which the job's metric_names declare")
