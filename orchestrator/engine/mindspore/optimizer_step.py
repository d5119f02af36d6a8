"""From summed buckets to new weights: average, clip once, step once, or refuse, on all ranks
alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mindspore import Tensor

from orchestrator.engine.common.packed_sums import BAD_WEIGHT, NON_FINITE, Trailer
from orchestrator.engine.mindspore.accumulator import Accumulator, unpack
from orchestrator.engine.mindspore.loss_sums import Tally
from orchestrator.engine.mindspore.optimizers import set_rate
from orchestrator.errors import JobError, NonFiniteError

EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_, so that both engines clip alike
REMEDIES = (
    "the weights are still those before it. Lower schedule.base_lr, set train.clip_norm, or "
    "train.on_non_finite=skip"
)


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of a window: the sums over ranks, whether it was applied, the averaged norm."""

    totals: Trailer
    stepped: bool
    norm: float | None


class Stepper:
    """The optimizer's side of the boundary.

    Args:
        accumulator: whose layout the buckets have.
        optimizer: called with the averaged, clipped gradients.
        clip_norm: largest norm of the averaged gradient, or None.
        on_non_finite: "stop" or "skip".
        where: names ranks and micro-steps, collectively, for messages.
        check: raises where the ranks' weights were not the same before the step.
    """

    def __init__(
        self,
        accumulator: Accumulator,
        optimizer: Any,
        *,
        clip_norm: float | None,
        on_non_finite: str,
        where: Callable[[int | None], str],
        check: Callable[[Trailer, int], None],
    ) -> None:
        self._accumulator, self._optimizer = accumulator, optimizer
        self._clip_norm, self._policy = clip_norm, on_non_finite
        self._where, self._check = where, check
        self._step = accumulator.compile(self._stepping(), "the optimizer's step")

    @property
    def compile_s(self) -> float:
        """Seconds spent in first calls of compiled functions so far."""
        return self._step.compile_s

    def set_rate(self, rate: float) -> None:
        """The learning rate of the next step."""
        set_rate(self._optimizer, rate)

    def apply(
        self, update: int, buckets: Sequence[Tensor], metric_count: int, tally: Tally
    ) -> Applied:
        """Step, or do not, as all ranks agree.

        Raises:
            JobError: weights that cannot be divided by.
            ReplicasDiffer: ranks that have drifted apart.
            NonFiniteError: the loss or the gradient is not finite, and the policy is "stop". An
                overflow under float16 is neither: the window is skipped, the loss scale halved.
        """
        totals = Trailer.of(self._accumulator.trailer_of(buckets), metric_count)
        self._check(totals, update)
        if totals.flags[BAD_WEIGHT]:
            raise JobError(
                f"Loss.weight was negative or not finite in update {update}, first on "
                f"{self._where(tally.first_bad_weight)}; it must be 0 or more"
            )
        weight, precision = totals.weight.value, self._accumulator.precision
        if weight <= 0:
            raise JobError(
                f"the weights of update {update} add up to {weight:g} over all ranks, and the "
                f"gradient cannot be divided by that; is every token masked?"
            )
        if totals.flags[NON_FINITE]:
            if self._policy == "stop":
                raise NonFiniteError(
                    f"the loss became NaN or infinite in update {update}, first on "
                    f"{self._where(tally.first_non_finite)}; {REMEDIES}"
                )
            return Applied(totals, stepped=False, norm=None)
        divisor = weight * precision.scale
        norm = self._accumulator.norm_of(buckets) / divisor
        if not math.isfinite(norm):
            if precision.may_overflow:
                precision.overflowed()
            elif self._policy == "stop":
                raise NonFiniteError(
                    f"the loss of update {update} is finite, but the gradient became NaN or "
                    f"infinite; {REMEDIES}"
                )
            return Applied(totals, stepped=False, norm=None)
        clip = 1.0 if self._clip_norm is None else min(1.0, self._clip_norm / (norm + EPSILON))
        factor = Tensor(clip / divisor, self._accumulator.dtype)
        self._step(factor, *buckets)
        precision.succeeded()
        return Applied(totals, stepped=True, norm=norm)

    def _stepping(self) -> Callable[..., Any]:
        optimizer = self._optimizer
        alone, layout = self._accumulator.alone, self._accumulator.layout
        sums, shapes = self._accumulator.sums, self._accumulator.shapes

        def step(factor: Tensor, *buckets: Tensor) -> Any:
            averaged: Any = ()
            for gradient in sums if alone else unpack(layout, shapes, buckets):
                averaged = (*averaged, gradient * factor)
            return optimizer(averaged)

        return step
