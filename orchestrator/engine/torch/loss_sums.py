"""What a rank has to say of its micro-steps: sums of weight, loss and metrics, and what went wrong.

Values on a device are kept as they are until the boundary, so a micro-step never waits for one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from orchestrator.engine.common.metric_names import check_metric_names
from orchestrator.engine.common.packed_sums import BAD_WEIGHT, NON_FINITE, Trailer
from orchestrator.engine.torch.checks.in_window.mean_or_sum import averaged_by
from orchestrator.errors import JobError
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

    def row(self, loss: Loss) -> list[Any]:
        """A micro-step's `weight`, `total` and `metrics`, for `add`; nothing is computed yet.

        Raises:
            JobError: `loss` is not what the job's contract says; the message says in what.
        """
        metrics = checked(loss, self._names)
        values = [loss.weight, loss.total, *(metrics[name] for name in self._names)]
        return [value.detach() if isinstance(value, Tensor) else value for value in values]

    def add(self, row: list[Any]) -> None:
        """Take in a micro-step."""
        self._rows.append(row)

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
    if isinstance(loss, Tensor):
        raise JobError(
            "loss() must return Loss(total, weight), but returned a plain tensor: a sum and what "
            "to divide it by, as in Loss(cross_entropy(scores, wanted, reduction='sum'), "
            "weight=len(wanted)); from orchestrator import Loss"
        )
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
    given: Any = loss.metrics
    if not isinstance(given, Mapping):
        raise JobError(f"Loss.metrics must be a dictionary, but is {given!r:.40}")
    _refuse_value("weight", loss.weight)
    for name, value in given.items():
        _refuse_value(f"metrics['{name}']", value)
    _refuse_mean(loss)
    check_metric_names(loss.metrics, names)
    return loss.metrics


def _refuse_value(what: str, value: Any) -> None:
    tensor = isinstance(value, Tensor)
    if (value.numel() == 1 and not value.is_complex()) if tensor else isinstance(value, Real):
        return
    found = f"a {value.dtype} tensor of shape {tuple(value.shape)}" if tensor else repr(value)
    raise JobError(f"Loss.{what} must be a real number, but is {found}")


def _refuse_mean(loss: Loss) -> None:
    """With a weight of 1 it may be a mean over one sample's numbers, which is that sample's own."""
    made_by = averaged_by(loss.total)
    if made_by is not None and float(loss.weight) != 1.0:
        raise JobError(
            f"Loss.total is a mean, made by {made_by}, and Loss.weight is {float(loss.weight):g}: "
            "it would be divided twice. Give the sum, with reduction='sum', or multiply the mean "
            "by what it was divided by"
        )


def _as_floats(rows: list[list[Any]]) -> list[list[float]]:
    """The same numbers as floats, with one transfer from the device for all of them."""
    tensors = [value for row in rows for value in row if isinstance(value, Tensor)]
    if all(tensor.is_cpu for tensor in tensors):
        return [[float(value) for value in row] for row in rows]
    # int64 and float64 hold all others exactly; a count above 2**53 is out of reach.
    device = tensors[0].device
    stacked = torch.stack([t.reshape(()).to(device, torch.float64) for t in tensors])
    moved = iter(stacked.tolist())
    return [[next(moved) if isinstance(v, Tensor) else float(v) for v in row] for row in rows]
