"""Where in the loop a rank is, and how long it took: a recorder around the recorder."""

from __future__ import annotations

from orchestrator.engine.api import BoundaryReport, Engine, Window
from orchestrator.lifecycle.signs.signs_of_life import Life
from orchestrator.rank.attending.rank_times import RankTimes
from orchestrator.rank.loop import Recorder


class Placed:
    """Marks each place for the signs of life, as the loop comes to it. Every rank has one.

    Args:
        waits_unmarked: the transport's collectives return before they are done (accelerators), so
            that a rank may wait for others anywhere in a boundary.
    """

    def __init__(
        self, inner: Recorder, life: Life, times: RankTimes, *, waits_unmarked: bool
    ) -> None:
        self._inner, self._life, self._waits_unmarked = inner, life, waits_unmarked
        self._times = times

    def micro_step(self, update: int, done: int, steps: int) -> None:
        if done < steps:
            self._life.at("micro-step %d of %d of update %d", done + 1, steps, update + 1)
        else:
            self._life.at("the boundary of update %d", update + 1, waits=self._waits_unmarked)
        self._inner.micro_step(update, done, steps)

    def boundary(
        self, window: Window, report: BoundaryReport, *, epoch: int, update_s: float
    ) -> None:
        self._life.at("what follows update %d (records, evaluation, checkpoint)", window.update + 1)
        self._times.window(report, update_s)
        self._inner.boundary(window, report, epoch=epoch, update_s=update_s)

    def evaluation(self, update: int, epoch: int, figures: dict[str, float]) -> None:
        self._inner.evaluation(update, epoch, figures)

    def checkpoint(self, updates: int, samples: int) -> None:
        self._inner.checkpoint(updates, samples)

    def together(self, engine: Engine, *, last: bool) -> None:
        self._times.together(engine, last=last)
