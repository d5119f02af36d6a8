"""Parts of every training loop: a rank's windows, when to save and evaluate, an update's line."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from orchestrator.engine.api import BoundaryReport, MicroBatch, Window
from orchestrator.plan.plan import Plan
from orchestrator.plan.window import planner_of


class RankWindows:
    """The planner seen from one rank. The loop and the loader ask for the same window, one ahead of
    the other, so the latest few are kept.

    Args:
        rates: of the job, in the place of the plan's.
        ranks: how many there are, where some of the plan's are gone. No micro-batch is larger then:
            what there was memory for, there is.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        rates: Callable[[int], float] | None = None,
        *,
        ranks: int | None = None,
    ) -> None:
        self._planner = planner_of(plan)
        if ranks is not None and ranks != plan.ranks:
            largest = max(size for sizes in plan.split.micro_batches for size in sizes)
            cap = plan.batch.micro_batch_cap or largest
            batch = replace(plan.batch, micro_batch_cap=cap)
            self._planner = replace(self._planner, ranks=ranks, batch=batch)
        self._rank, self._rates = rank, rates
        self.window = lru_cache(maxsize=4)(self._window)

    def _window(self, update: int) -> Window:
        mine = self._planner.window(update, self._rank)
        return Window(
            update=update,
            samples=mine.samples,
            micro_batches=tuple(
                MicroBatch(update=update, start=start, indices=indices)
                for start, indices in mine.micro_batches
            ),
            steps=mine.steps,
            learning_rate=self._rates(update) if self._rates else mine.learning_rate,
            samples_per_rank=mine.samples_per_rank,
        )

    def epoch_of(self, update: int) -> int:
        return self._planner.order.epoch_of(update)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cadence:
    """When to evaluate and to save: every n updates, at the ends of epochs (None), or never (0)."""

    every: int | None

    def due(self, done: int, *, epoch_ends: bool) -> bool:
        return epoch_ends if self.every is None else bool(self.every) and done % self.every == 0


def update_line(report: BoundaryReport, update_s: float) -> dict[str, Any]:
    """What a line of metrics.jsonl says of an update by its boundary's report."""
    seconds = ("compute_s", "wait_s", "optimizer_s", "compile_s", "plain_step_s")
    always = seconds[:3]
    return {
        "update": report.update,
        "time": time.time(),
        "loss": report.loss,
        "weight": report.weight,
        "collectives": report.collectives,
        **({"exchanges": report.exchanges} if report.exchanges else {}),
        "bytes_on_wire": report.bytes_on_wire,
        **{
            name: round(spent, 6)
            for name in seconds
            if (spent := getattr(report, name)) or name in always
        },
        "update_s": round(update_s, 6),
        "gradient_norm": report.gradient_norm,
        "applied": report.applied,
        "loss_scale": report.loss_scale,
        "metrics": dict(report.metrics),
    }
