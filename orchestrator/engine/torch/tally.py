"""What a rank has to say of its micro-steps: sums of weight, loss and metrics, and what went wrong.

Values on a device are kept as they are until the boundary, so a micro-step never waits for one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from orchestrator.engine.trailer import BAD_WEIGHT, NON_FINITE, Trailer
from orchestrator.errors import JobError, did_you_mean
from orchestrator.job import Loss


class Tally:
    """One window's `Loss` values, in the order of micro-steps.

    Args:
        metric_names: that every `Loss.metrics` has to hold, no more and no less.
    """

    def __init__(self, metric_names: Sequence[str]) -> None:
        self._names = tuple(metric_names)
        self._rows: list[list[Any]] = []
        self.first_non_finite: int | None = None
        self.first_bad_weight: int | None = None

    def begin(self) -> None:
        """Forget: a window begins."""
        self._rows.clear()
        self.first_non_finite = self.first_bad_weight = None

    @property
    def micro_steps(self) -> int:
        """How many were added."""
        return len(self._rows)

    def add(self, loss: Loss) -> None:
        """Take in a micro-step's `total`, `weight` and `metrics`; nothing is computed yet.

        Raises:
            JobError: `loss` is not what the job's contract says; the message says in what.
        """
        metrics = checked(loss, self._names)
        values = [loss.weight, loss.total, *(metrics[name] for name in self._names)]
        self._rows.append([v.detach() if isinstance(v, Tensor) else v for v in values])

    def trailer(self) -> Trailer:
        """The sums, each exact, with the flags of what is not usable."""
        trailer = Trailer.empty(len(self._names))
        for step, (weight, total, *metrics) in enumerate(_as_floats(self._rows)):
            if not (math.isfinite(weight) and weight >= 0):
                if self.first_bad_weight is None:
                    self.first_bad_weight = step
                continue
            if not math.isfinite(total) and self.first_non_finite is None:
                self.first_non_finite = step
            trailer.weight.add(weight)
            trailer.loss.add(total)
            for metric, value in zip(trailer.metrics, metrics, strict=True):
                metric.add(value)
        trailer.flags[NON_FINITE] = int(self.first_non_finite is not None)
        trailer.flags[BAD_WEIGHT] = int(self.first_bad_weight is not None)
        return trailer


def checked(loss: Loss, names: Sequence[str]) -> Mapping[str, Any]:
    """The metrics of `loss`, which is what the contract says, or `JobError`."""
    if not all(hasattr(loss, part) for part in ("total", "weight", "metrics")):
        raise JobError(
            f"loss() must return Loss(total, weight), but returned {type(loss).__name__}; "
            "from orchestrator import Loss"
        )
    total = loss.total
    if not isinstance(total, Tensor) or total.numel() != 1 or total.is_complex():
        what = f"shape {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise JobError(
            f"Loss.total must be a real scalar tensor, but is {what}; use reduction='sum'"
        )
    if not total.requires_grad:
        raise JobError(
            "Loss.total has no graph to back-propagate; was it detached, or computed without grad?"
        )
    for name in loss.metrics:
        if name not in names:
            raise JobError(
                f"Loss.metrics has '{name}', which the job's metric_names do not declare"
                f"{did_you_mean(name, names)}"
            )
    for name in names:
        if name not in loss.metrics:
            raise JobError(f"Loss.metrics lacks '{name}', which the job's metric_names declare")
    return loss.metrics


def _as_floats(rows: list[list[Any]]) -> list[list[float]]:
    """The same numbers as floats, with one transfer from the device for all of them."""
    tensors = [value for row in rows for value in row if isinstance(value, Tensor)]
    if not tensors:
        return [[float(value) for value in row] for row in rows]
    # int64 and float64 hold all others exactly; a count above 2**53 is out of reach.
    device = tensors[0].device
    stacked = torch.stack([t.reshape(()).to(device, torch.float64) for t in tensors])
    moved = iter(stacked.tolist())
    return [[next(moved) if isinstance(v, Tensor) else float(v) for v in row] for row in rows]
