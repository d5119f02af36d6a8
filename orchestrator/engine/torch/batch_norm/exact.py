"""A batch norm whose statistics are those of the whole window, and the mathematics that it needs.

With statistics t_1 .. t_n of n norms, in the order of the forward, the loss is L = sum_b F_b(w, t),
where t_l is a function of the inputs of norm l in all micro-batches b, and thus of w and of the
t_k before it. The gradient follows by the chain rule from the last norm to the first:

    m_l  = sum_b d/dt_l (F_b + sum_{k>l} S_kb)         S_kb: norm k's part of micro-batch b, whose
    dL/dw = sum_b d/dw (F_b + sum_l S_lb)              derivative is that of <m_k, t_k>

With t = (mean, var) over N places, d<m, t>/dx = m_mean / N + 2 m_var (x - mean) / N: the mean
within the variance adds nothing, since deviations add up to 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module, functional
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]  # the common base

from orchestrator.errors import JobError


class Enough(BaseException):
    """Ends a forward where statistics are known. Not an error, so no job's `except` stops it."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of one norm's inputs over a window: places, mean and variance (biased), float64, (channels,).

    A row is (1 + 2 channels,): places, mean, sum of squared deviations.
    """

    places: float
    mean: Tensor
    variance: Tensor

    @staticmethod
    def row(x: Tensor) -> Tensor:
        """The row of one micro-batch's input (samples, channels, *)."""
        wide = x.detach().double()
        axes = [axis for axis in range(x.dim()) if axis != 1]
        mean = wide.mean(axes)
        squares = (wide - _along(mean, x)).square().sum(axes)
        return torch.cat([mean.new_tensor([x.numel() // x.shape[1]]), mean, squares])

    @classmethod
    def of(cls, rows: Sequence[Tensor]) -> Statistics:
        """Of all rows together, added up one after the other, so that rows of zeros change no bit.

        Source: Chan, Golub and LeVeque 1983, for any number of parts.
        """
        channels = len(rows[0]) // 2
        places = sum(float(row[0]) for row in rows)
        mean = in_order([row[0] * row[1 : channels + 1] for row in rows]) / places
        squares = in_order(
            [row[channels + 1 :] + row[0] * (row[1 : channels + 1] - mean).square() for row in rows]
        )
        return cls(places, mean, squares / places)


def in_order(rows: Sequence[Tensor]) -> Tensor:
    """The sum, from the first to the last."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


class ExactBatchNorm(Module):
    """Normalizes by the statistics that it is told. Its state has the names of a batch norm's.

    In evaluation mode it is the batch norm that it replaces.
    """

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, name: str, layer: _BatchNorm) -> None:
        super().__init__()
        self.name, self.eps, self.momentum = name, layer.eps, layer.momentum
        self.channels = layer.num_features
        self.train(layer.training)
        self.register_parameter("weight", layer.weight)
        self.register_parameter("bias", layer.bias)
        for buffer in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(buffer, getattr(layer, buffer))
        self.trial: list[ExactBatchNorm] | None = None  # takes note of the order of calls
        self.asked = False  # end the forward here, with a row
        self.row: Tensor | None = None
        self.statistics: Statistics | None = None
        self.variables: tuple[Tensor, Tensor] | None = None  # in place of them, to differentiate by
        self.influence: Tensor | None = None  # m of the module's text: (2 channels,)
        self.parts: list[Tensor] = []  # S of the module's text; its value is 0

    def forward(self, x: Tensor) -> Tensor:
        """(samples, channels, *) -> the same."""
        if not self.training:
            return functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias,
                training=self.running_mean is None, eps=self.eps,
            )  # fmt: skip
        if self.trial is not None:
            self.trial.append(self)
            found = Statistics.of([Statistics.row(x)])
            return self._normalized(x, found.mean, found.variance)
        if self.asked:
            self.row = Statistics.row(x)
            raise Enough
        known = self.statistics
        if known is None:
            raise JobError(
                f"engine.norm=exact: {self.name} was called where its statistics are not known: "
                "outside of an update's micro-steps, or in another order than when it was tried"
            )
        if self.influence is not None:
            self.parts.append(self._part(x, known, self.influence))
        return self._normalized(x, *(self.variables or (known.mean, known.variance)))

    def _normalized(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        scale = (variance + self.eps).rsqrt().to(dtype)
        y = (x - _along(mean.to(dtype), x)) * _along(scale, x)
        if self.weight is not None:
            y = y * _along(self.weight, x)
        if self.bias is not None:
            y = y + _along(self.bias, x)
        return y.to(x.dtype)

    def _part(self, x: Tensor, known: Statistics, influence: Tensor) -> Tensor:
        by_mean, by_variance = influence.split(self.channels)
        apart = x.detach().double() - _along(known.mean, x)
        slope = (_along(by_mean, x) + 2 * _along(by_variance, x) * apart) / known.places
        return ((x - x.detach()) * slope).sum()

    def take_parts(self) -> list[Tensor]:
        """The parts of the forward that has just been run."""
        parts, self.parts = self.parts, []
        return parts

    def forget(self) -> None:
        """A window begins: nothing is known."""
        self.row = self.statistics = self.variables = self.influence = None
        self.asked = False
        self.parts.clear()

    def follow(self) -> None:
        """Move the running statistics, as one batch norm of the whole batch does in its forward."""
        known = self.statistics
        if known is None or self.running_mean is None or self.running_var is None:
            return
        share = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if share is None:  # torch's way to ask for the mean of all
                share = 1.0 / float(self.num_batches_tracked)
        unbiased = known.variance * (known.places / max(known.places - 1, 1))
        for running, now in ((self.running_mean, known.mean), (self.running_var, unbiased)):
            running.mul_(1 - (share or 0.0)).add_(now.to(running.dtype), alpha=share or 0.0)


def _along(channels: Tensor, x: Tensor) -> Tensor:
    """(channels,) as what broadcasts along axis 1 of `x`."""
    return channels.view(-1, *[1] * (x.dim() - 2))
