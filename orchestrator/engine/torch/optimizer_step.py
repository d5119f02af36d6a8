"""The end of an update: average, clip and step once, or refuse to, on all ranks alike."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from orchestrator.engine.common.boundary.packed_sums import Trailer
from orchestrator.engine.common.boundary.update_policy import UpdatePolicy
from orchestrator.engine.settings import AccumulationOptions
from orchestrator.engine.torch.comm.base_group import BaseGroup
from orchestrator.engine.torch.comm.gathered import numbers_of_all
from orchestrator.engine.torch.gradients.gradient_norm import GradientNorm
from orchestrator.engine.torch.gradients.unused_parameters import UsedParameters
from orchestrator.engine.torch.loss_sums import Tally
from orchestrator.engine.torch.model.precision import Precision
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
        self._precision, self._used = precision, used
        self._policy = UpdatePolicy(options, precision, partial(numbers_of_all, group))
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
        if not self._policy.losses_usable(update, totals, tally):
            return None, False
        found = self._policy.factor(
            update, totals.weight.value / divided_by, norm_of_sum.value(), summed.non_finite
        )
        if found is None:
            return None, False
        norm, factor = found
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
