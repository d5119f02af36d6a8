"""Parts of every training loop: a rank's windows, when to save and evaluate, an update's line."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from orchestrator.engine.api import BoundaryReport, MicroBatch, Window
from orchestrator.plan.plan import Plan
from orchestrator.plan.window import planner_of


class RankWindows:
    """The windows of one rank, from the plan. Loop and loader ask for the same window at different
    times, so the latest few are cached.

    Args:
        rates: of the job, in the place of the plan's.
        ranks: their number, where it is not the plan's. No micro-batch becomes larger then, since
            it might not fit into memory.
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


def is_due(every: int | None, done: int, *, epoch_ends: bool) -> bool:
    """Return whether to evaluate or save after `done` updates.

    Args:
        every: n updates; None: at the ends of epochs; 0: never.
    """
    return epoch_ends if every is None else bool(every) and done % every == 0


def update_line(report: BoundaryReport, update_s: float) -> dict[str, Any]:
    """Return what a line of metrics.jsonl takes from the report of an update's boundary."""
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
