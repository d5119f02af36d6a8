"""One rank's windows, update by update, in the form that engines take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from orchestrator.engine.api import MicroBatch, Window
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
