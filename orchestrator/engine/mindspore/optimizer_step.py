"""From summed buckets to new weights: average, clip once, step once, or refuse, on all ranks
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mindspore import Tensor, ops

from orchestrator.engine.common.boundary.packed_sums import Trailer
from orchestrator.engine.common.boundary.update_policy import UpdatePolicy
from orchestrator.engine.mindspore.accumulator import Accumulator
from orchestrator.engine.mindspore.bucket_layout import Layout
from orchestrator.engine.mindspore.loss_sums import Tally
from orchestrator.engine.mindspore.optimizers import set_rate


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
        policy: whether it is called.
        check: raises where the ranks' weights were not the same before the step.
    """

    def __init__(
        self,
        accumulator: Accumulator,
        optimizer: Any,
        policy: UpdatePolicy,
        *,
        check: Callable[[Trailer, int], None],
    ) -> None:
        self._accumulator, self._optimizer = accumulator, optimizer
        self._policy, self._check = policy, check
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
        if not self._policy.losses_usable(update, totals, tally):
            return Applied(totals, stepped=False, norm=None)
        norm_of_sum = self._accumulator.norm_of(buckets)
        # Which parameters are not finite is not told here: their sums lie in compiled buckets.
        found = self._policy.factor(update, totals.weight.value, norm_of_sum, list)
        if found is None:
            return Applied(totals, stepped=False, norm=None)
        norm, factor = found
        self._step(Tensor(factor, self._accumulator.dtype), *buckets)
        self._accumulator.precision.succeeded()
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


def unpack(
    layout: Layout, shapes: Sequence[tuple[int, ...]], buckets: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Tensors of these shapes from the buckets that they lie in. Works in a graph."""
    tensors: Any = ()
    for spans, shape in zip(layout.found, shapes):  # noqa: B905  # no strict in graphs
        parts: Any = ()
        for bucket, start, stop in spans:
            parts = (*parts, buckets[bucket][start:stop])
        flat = ops.concat(parts) if len(parts) > 1 else parts[0]
        tensors = (*tensors, flat.reshape(shape))
    return tensors
