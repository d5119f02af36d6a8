"""Where a run stands, as a rank that has done the last update tells one that has not."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from orchestrator.engine.api import BoundaryReport, Window
from orchestrator.rank.loop import Done, Outcome


def told(outcome: Outcome) -> str:
    """As text that travels."""
    if outcome.done is None:
        return "null"
    window = replace(outcome.done.window, micro_batches=())
    return json.dumps(
        {
            "window": asdict(window),
            "report": asdict(outcome.done.report),
            "seconds": outcome.done.seconds,
            "samples": outcome.samples,
        }
    )


def take(outcome: Outcome, text: str) -> None:
    """Stand there: one update farther, or, of a newcomer, wherever the others are."""
    found: dict[str, Any] = json.loads(text)
    window = Window(**found["window"] | {"micro_batches": ()})
    outcome.take(Done(window, BoundaryReport(**found["report"]), found["seconds"]))
    outcome.samples = found["samples"]
