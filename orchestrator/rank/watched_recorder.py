"""A recorder around the recorder that leaves the loop when the others have gone on, or are to."""

from __future__ import annotations

from typing import Protocol

from orchestrator.engine.api import BoundaryReport, Engine, Window
from orchestrator.rank.loop import Attended


class Checks(Protocol):
    """What it asks; the first two raise `PeerLost` when there is a newer generation."""

    place: tuple[int, int]

    def check(self) -> None: ...
    def check_record(self) -> None: ...
    def tell_newcomers(self) -> None: ...


class Watched:
    """See `Survivors.watched`."""

    def __init__(self, inner: Attended, survivors: Checks) -> None:
        self._inner, self._survivors = inner, survivors

    def micro_step(self, update: int, done: int, steps: int) -> None:
        self._survivors.check()
        if done == steps:
            self._survivors.tell_newcomers()
        self._inner.micro_step(update, done, steps)

    def boundary(
        self, window: Window, report: BoundaryReport, *, epoch: int, update_s: float
    ) -> None:
        self._check()
        self._inner.boundary(window, report, epoch=epoch, update_s=update_s)

    def evaluation(self, update: int, epoch: int, figures: dict[str, float]) -> None:
        self._check()
        self._inner.evaluation(update, epoch, figures)

    def checkpoint(self, updates: int, samples: int) -> None:
        self._check()
        self._inner.checkpoint(updates, samples)

    def together(self, engine: Engine, *, last: bool) -> None:
        self._inner.together(engine, last=last)

    def _check(self) -> None:
        if self._survivors.place[0] == 0:  # the others write nothing
            self._survivors.check_record()
