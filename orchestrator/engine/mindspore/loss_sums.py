"""What a rank has to say of its micro-steps: sums of weight, loss and metrics, and what went wrong.

Values are kept as tensors until the boundary, so that a micro-step never waits for one.
"""

from __future__ import annotations

import math
from typing import Any

from mindspore import Tensor

from orchestrator.engine.common.packed_sums import BAD_WEIGHT, NON_FINITE, Trailer


def as_float(value: Any) -> float:
    """A number or a tensor of one number, waited for."""
    return float(value.asnumpy()) if isinstance(value, Tensor) else float(value)


class Tally:
    """One window's losses, in the order of micro-steps."""

    def __init__(self, metric_count: int) -> None:
        self._metric_count = metric_count
        self._rows: list[Tensor] = []
        self.first_non_finite: int | None = None
        self.first_bad_weight: int | None = None
        self._before = 0

    def begin(self) -> None:
        """Forget: a window begins."""
        self._rows.clear()
        self._before = 0
        self.first_non_finite = self.first_bad_weight = None

    def add(self, figures: Tensor) -> None:
        """Take in a micro-step's [total, weight, *metrics]; nothing is waited for yet."""
        self._rows.append(figures)

    def trailer(self) -> Trailer:
        """The sums since the last trailer, each exact, with the flags of what is not usable."""
        trailer = Trailer.empty(self._metric_count)
        bad_weight = non_finite = False
        for step, figures in enumerate(self._rows, self._before):
            total, weight, *metrics = figures.asnumpy().tolist()
            if not (math.isfinite(weight) and weight >= 0):
                bad_weight = True
                if self.first_bad_weight is None:
                    self.first_bad_weight = step
                continue
            if not math.isfinite(total):
                non_finite = True
                if self.first_non_finite is None:
                    self.first_non_finite = step
            trailer.weight.add(weight)
            trailer.loss.add(total)
            for metric, value in zip(trailer.metrics, metrics, strict=True):
                metric.add(value)
        trailer.flags[NON_FINITE] = int(non_finite)
        trailer.flags[BAD_WEIGHT] = int(bad_weight)
        self._before += len(self._rows)
        self._rows.clear()
        return trailer
