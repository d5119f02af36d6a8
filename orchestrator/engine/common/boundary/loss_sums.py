"""What a rank has to say of its micro-steps: sums of weight, loss and metrics, and what went wrong.

Values on a device are kept as they are until the boundary, so a micro-step never waits for one. No
framework is imported: an engine says how its rows become floats.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from orchestrator.engine.common.boundary.packed_sums import BAD_WEIGHT, NON_FINITE, Trailer


class LossSums(ABC):
    """One window's losses, in the order of micro-steps.

    Args:
        metric_count: how many metrics each has.

    Attributes:
        first_non_finite, first_bad_weight: micro-steps of this window where something was not
            usable, as far as was looked.
    """

    def __init__(self, metric_count: int) -> None:
        self._metric_count = metric_count
        self._rows: list[Any] = []
        self.begin()

    def begin(self) -> None:
        """Forget: a window begins."""
        self._rows.clear()
        self._before = 0
        self.first_non_finite: int | None = None
        self.first_bad_weight: int | None = None

    @property
    def micro_steps(self) -> int:
        """How many were added."""
        return self._before + len(self._rows)

    def add(self, row: Any) -> None:
        """Take in a micro-step; nothing is waited for yet."""
        self._rows.append(row)

    def trailer(self) -> Trailer:
        """The sums since the last trailer, each exact, with the flags of what is not usable."""
        trailer = Trailer.empty(self._metric_count)
        for step, (weight, total, *metrics) in enumerate(self.floats(self._rows), self._before):
            if not (math.isfinite(weight) and weight >= 0):
                trailer.flags[BAD_WEIGHT] = 1
                if self.first_bad_weight is None:
                    self.first_bad_weight = step
                continue
            if not math.isfinite(total):
                trailer.flags[NON_FINITE] = 1
                if self.first_non_finite is None:
                    self.first_non_finite = step
            trailer.weight.add(weight)
            trailer.loss.add(total)
            for metric, value in zip(trailer.metrics, metrics, strict=True):
                metric.add(value)
        self._before += len(self._rows)
        self._rows.clear()
        return trailer

    @abstractmethod
    def floats(self, rows: Sequence[Any]) -> Iterable[Sequence[float]]:
        """Of each row weight, total and metrics, waited for."""
