"""Numbers of MindSpore's tensors; a window's losses (see `engine.common.boundary.loss_sums`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mindspore import Tensor

from orchestrator.engine.common.boundary.loss_sums import LossSums


def as_float(value: Any) -> float:
    """A number or a tensor of one number, waited for."""
    return float(value.asnumpy()) if isinstance(value, Tensor) else float(value)


class Tally(LossSums):
    """One window's losses, each a tensor [total, weight, *metrics]."""

    def floats(self, rows: Sequence[Tensor]) -> Iterator[list[float]]:
        """Weight, total and metrics of each, waited for."""
        for figures in rows:
            total, weight, *metrics = figures.asnumpy().tolist()
            yield [weight, total, *metrics]
