"""Differences between two runs: their settings and losses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from orchestrator.config.changes import flat
from orchestrator.report.compare import Comparison
from orchestrator.report.secrets import shown
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
    left, right = (flat(run.read_config()) for run in (a, b))
    return {
        key: [left.get(key), right.get(key)]
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key) and key.partition(".")[0] not in OF_NO_NUMBERS
    }


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """Two runs, or two files of weights.

    Attributes:
        weights: of the newest checkpoints, tensor by tensor.
        settings: keys of the configuration that differ, with both values; None of files.
        losses: None of files.
    """

    weights: Comparison
    settings: dict[str, list[Any]] | None = None
    losses: CurveComparison | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what `compare --json` prints."""
        if self.settings is None or self.losses is None:
            return asdict(self.weights)
        return {
            **asdict(self.weights),
            "settings": self.settings,
            "losses": asdict(self.losses),
        }


def compare_folders(weights: Comparison, a: RunDir, b: RunDir) -> RunComparison:
    """Return the comparison of two runs whose weights have been compared."""
    settings, losses = differing_settings(a, b), compare_curves(a, b)
    return RunComparison(weights=weights, settings=settings, losses=losses)


def print_run_comparison(compared: RunComparison, console: Console) -> None:
    """Print how two runs differ in settings and losses."""
    for key, values in (compared.settings or {}).items():
        left, right = ("null" if value is None else shown(key, value) for value in values)
        say(console, f"{key}: {left} against {right}")
    curves = compared.losses
    if curves is None:
        return
    if curves.first is None:
        if curves.updates:
            say(console, f"the same loss in each of {plural(curves.updates, 'update')}")
        return
    say(
        console,
        f"losses differ from update {curves.first} on, by up to "
        f"{curves.max_relative_difference:.3e} (in update {curves.update}, relative)",
    )
