"""Differences between two runs: their settings and losses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from orchestrator.config.changes import flat
from orchestrator.report.page_data import shown
from orchestrator.report.terminal import say
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import read_metrics
from orchestrator.units import plural

OF_NO_NUMBERS = ("run", "sweep", "tracker", "notify", "facts")  # sections of the configuration


@dataclass(frozen=True, kw_only=True)
class CurveComparison:
    """The losses of two runs, update by update.

    Attributes:
        updates: that both have made.
        first: the first of them (from 0) whose losses are not the same number; None if none is.
        max_relative_difference: of the losses, relative to the larger; None without updates.
        update: where that is.
    """

    updates: int
    first: int | None
    max_relative_difference: float | None
    update: int | None


def compare_curves(a: RunDir, b: RunDir) -> CurveComparison:
    """Compare the recorded losses of two runs, in one pass over each."""
    count, first, largest, place = 0, None, None, None
    for left, right in zip(_losses(a), _losses(b), strict=False):
        difference = 0.0
        if left != right and not (math.isnan(left) and math.isnan(right)):
            first = count if first is None else first
            distance = abs(left - right)
            difference = (
                distance / max(abs(left), abs(right)) if math.isfinite(distance) else math.inf
            )
        if largest is None or difference > largest:
            largest, place = difference, count
        count += 1
    return CurveComparison(
        updates=count, first=first, max_relative_difference=largest, update=place
    )


def _losses(run: RunDir) -> Iterator[float]:
    for record in read_metrics(run.metrics).updates:
        loss = record.get("loss")
        yield math.nan if loss is None else float(loss)


def differing_settings(a: RunDir, b: RunDir) -> dict[str, list[Any]]:
    """Return the values of each setting that differs, but for places and recipients of messages."""
    left, right = (dict(flat(run.read_config())) for run in (a, b))
    return {
        key: [left.get(key), right.get(key)]
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key) and key.partition(".")[0] not in OF_NO_NUMBERS
    }


def print_runs(a: RunDir, b: RunDir, console: Console) -> None:
    """Print how two runs differ in settings and losses."""
    for key, values in differing_settings(a, b).items():
        left, right = ("null" if value is None else shown(key, value) for value in values)
        say(console, f"{key}: {left} against {right}")
    curves = compare_curves(a, b)
    if curves.first is None:
        if curves.updates:
            say(console, f"the same loss in each of {plural(curves.updates, 'update')}")
        return
    say(
        console,
        f"losses differ from update {curves.first} on, by up to "
        f"{curves.max_relative_difference:.3e} (in update {curves.update}, relative)",
    )
