"""The end of an update: average, clip and step once, or refuse to, on all ranks alike."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from orchestrator.engine.common.packed_sums import BAD_WEIGHT, NON_FINITE, Trailer
from orchestrator.engine.settings import AccumulationOptions
from orchestrator.engine.torch.comm.base_group import BaseGroup
from orchestrator.engine.torch.gradients.clipping import GradientNorm, factor_for
from orchestrator.engine.torch.gradients.unused_parameters import UsedParameters
from orchestrator.engine.torch.loss_sums import Tally
from orchestrator.engine.torch.model.precision import Precision
from orchestrator.engine.torch.skipped_updates import Refusals
from orchestrator.errors import JobError


class Summed(Protocol):
    """The summed gradient: all of it (`GradientBuffers`), or a rank's share (`OptimizerShard`)."""

    @property
    def gradients(self) -> Sequence[Tensor]:
        """Its numbers, flat."""
        ...

    def detach(self, unused: Iterable[int]) -> None:
        """The optimizer is to step on all of it but the gradients of these parameters."""
        ...

    def attach(self) -> None:
        """It has stepped."""
        ...

    def non_finite(self) -> list[str]:
        """Names of the parameters whose gradient holds NaN or infinity, the same on all ranks."""
        ...


class Step:
    """What follows the reduction, up to the optimizer's own step, which `Accumulator` calls.

    Args:
        optimizer: steps on the averaged gradient.
        group: the ranks.
        precision: its loss scale is taken out; an overflow halves it.
        used: which parameters had a gradient.
        options: the accumulator's.

    Raises:
        ConfigError: a setting that cannot be used.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: BaseGroup,
        precision: Precision,
        used: UsedParameters,
        options: AccumulationOptions,
    ) -> None:
        self._precision, self._used, self._clip_norm = precision, used, options.clip_norm
        self._refusals = Refusals(group, options.on_non_finite)
        self._steps = False  # a step of ours runs
        self._guard = _only_at_boundaries(self, optimizer)

    @property
    def steps(self) -> bool:
        """Whether the optimizer may step now."""
        return self._steps

    def close(self) -> None:
        """Leave the optimizer to others."""
        self._guard.remove()

    def prepare(
        self,
        update: int,
        totals: Trailer,
        norm_of_sum: GradientNorm,
        summed: Summed,
        tally: Tally,
        *,
        divided_by: float,
    ) -> tuple[float | None, bool]:
        """Average and clip, unless something is not finite. Gives the averaged gradient's norm, and
        whether the optimizer is to step.

        Collective where it refuses, or where the set of used parameters changed.

        Args:
            update: its number, for messages.
            totals: of all ranks.
            norm_of_sum: of the summed gradient.
            summed: the gradient; afterwards the averaged and clipped one.
            tally: where this rank's micro-steps went wrong.
            divided_by: what losses were divided by before their backward.

        Raises:
            NonFiniteError, JobError: see `Accumulator.boundary`.
        """
        if totals.flags[BAD_WEIGHT] or totals.weight.value <= 0:
            raise self._refusals.weight(update, totals, tally.first_bad_weight)
        if totals.flags[NON_FINITE]:
            self._refusals.loss(update, tally.first_non_finite)
            return None, False
        norm_of_all = norm_of_sum.value()
        if not norm_of_all < float("inf"):
            if self._precision.may_overflow:
                self._precision.overflowed()
            else:
                self._refusals.gradient(update, summed.non_finite)
            return None, False
        divisor = totals.weight.value / divided_by * self._precision.scale
        norm, factor = factor_for(norm_of_all, divisor, self._clip_norm)
        if factor != 1.0:
            for gradient in summed.gradients:
                gradient.mul_(factor)
        unused = self._used.unused(totals)
        if len(unused) == self._used.count:
            raise JobError(
                f"no gradient reached any parameter in update {update}, on any rank: were the "
                "losses computed by another model, or by a copy of this one?"
            )
        summed.detach(unused)
        return norm, True

    @contextmanager
    def allowed(self, summed: Summed) -> Generator[None]:
        """The optimizer may step meanwhile, on what was prepared."""
        self._steps = True
        try:
            yield
        finally:
            self._steps = False
        summed.attach()
        self._precision.succeeded()


def _only_at_boundaries(step: Step, optimizer: Optimizer) -> Any:
    """Have `optimizer` refuse to be stepped by others as long as `step` lives; gives the handle."""
    itself = weakref.ref(step)

    def before(*_: Any) -> None:
        living = itself()
        if living is not None and not living.steps:
            raise JobError(
                "optimizer.step() was called, but the optimizer steps at the boundary: call "
                "accumulator.boundary() instead, which reduces, divides, clips and steps once"
            )

    return optimizer.register_step_pre_hook(before)
