"""A loss as its contract says; the sums of a window's (`engine.common.boundary.loss_sums`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from orchestrator.engine.common.boundary.loss_sums import LossSums
from orchestrator.engine.common.metric_names import check_metric_names
from orchestrator.engine.torch.checks.in_window.mean_or_sum import averaged_by
from orchestrator.errors import JobError
from orchestrator.job import Loss

_PLAIN = (int, float)


class Tally(LossSums):
    """One window's `Loss` values.

    Args:
        metric_names: that every `Loss.metrics` has to hold, no more and no less.
    """

    def __init__(self, metric_names: Sequence[str]) -> None:
        super().__init__(len(metric_names))
        self._names = tuple(metric_names)

    def row(self, loss: Loss) -> list[Any]:
        """A micro-step's `weight`, `total` and `metrics`, for `add`; nothing is computed yet.

        Raises:
            JobError: `loss` is not what the job's contract says; the message says in what.
        """
        metrics = checked(loss, self._names)
        values = [loss.weight, loss.total, *(metrics[name] for name in self._names)]
        return [value.detach() if isinstance(value, Tensor) else value for value in values]

    def floats(self, rows: Sequence[list[Any]]) -> list[list[float]]:
        """The same numbers, with one transfer from the device for all of them."""
        tensors = [value for row in rows for value in row if isinstance(value, Tensor)]
        if all(tensor.is_cpu for tensor in tensors):
            return [[float(value) for value in row] for row in rows]
        # int64 and float64 hold all others exactly; a count above 2**53 is out of reach.
        device = tensors[0].device
        stacked = torch.stack([t.reshape(()).to(device, torch.float64) for t in tensors])
        moved = iter(stacked.tolist())
        return [[next(moved) if isinstance(v, Tensor) else float(v) for v in row] for row in rows]


def checked(loss: Loss, names: Sequence[str]) -> Mapping[str, Any]:
    """The metrics of `loss`, which is what the contract says, or `JobError`."""
    if isinstance(loss, Tensor):
        raise JobError(
            "loss() must return Loss(total, weight), but returned a plain tensor: a sum and what "
            "to divide it by, as in Loss(cross_entropy(scores, wanted, reduction='sum'), "
            "weight=len(wanted)); from orchestrator import Loss"
        )
    parts = ("total", "weight", "metrics")
    if type(loss) is not Loss and not all(hasattr(loss, part) for part in parts):
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
    if type(given) is not dict and not isinstance(given, Mapping):
        raise JobError(f"Loss.metrics must be a dictionary, but is {given!r:.40}")
    _refuse_value("weight", loss.weight)
    for name, value in given.items():
        _refuse_value(f"metrics['{name}']", value)
    _refuse_mean(loss)
    check_metric_names(loss.metrics, names)
    return loss.metrics


def _refuse_value(what: str, value: Any) -> None:
    if type(value) in _PLAIN:  # a look at an abstract class takes longer than all the rest
        return
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
