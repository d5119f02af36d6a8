"""Rank 0's log tells how training goes, a line now and then: what `logs RUN -f` shows.

In the beginning a line a second at most, after hours one a minute: 1,440 a day, however short the
updates are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from orchestrator.units import format_learning_rate, format_number, format_rate

SHORTEST_S = 1.0
LONGEST_S = 60.0
LINES = 200  # about so many while the interval grows by a given factor


class UpdateLines:
    """One attempt's.

    Args:
        total: updates that are planned.
        clock: in seconds.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._clock = total, clock
        self._began = self._last = clock()
        self._samples = 0
        self._first = True
        self._evaluated = -LONGEST_S

    def _interval_s(self, now: float) -> float:
        return min(LONGEST_S, max(SHORTEST_S, (now - self._began) / LINES))

    def update(self, update: int, *, loss: float, learning_rate: float, samples: int) -> None:
        """An update (from 0) is done. The first and the last one are always told."""
        now = self._clock()
        self._samples += samples
        since = now - self._last
        if not (self._first or update + 1 == self._total or since >= self._interval_s(now)):
            return
        rate = f"  {format_rate(self._samples / since)}" if since > 0 else ""
        self._first, self._samples, self._last = False, 0, now
        _log(
            f"update {update + 1}/{self._total}  loss {format_number(loss)}  "
            f"learning rate {format_learning_rate(learning_rate)}{rate}"
        )

    def evaluation(self, update: int, figures: Mapping[str, float]) -> None:
        """Held-out figures after an update (from 0); as seldom as updates, but for the last."""
        now = self._clock()
        if update + 1 < self._total and now - self._evaluated < self._interval_s(now):
            return
        self._evaluated = now
        values = ", ".join(f"{name} {format_number(value)}" for name, value in figures.items())
        if values:
            _log(f"held-out after update {update + 1}: {values}")


def _log(line: str) -> None:
    try:
        print(line, flush=True)
    except OSError:  # a full disk; that metrics.jsonl is lacking lines is told as a warning
        return
