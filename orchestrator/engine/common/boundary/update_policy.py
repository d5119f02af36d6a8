"""Whether a window is applied: averaged and clipped, skipped, or refused, on all ranks alike.

By the boundary all ranks know from the trailer *that* something is wrong. To say *where*, they
exchange it: one more collective, in windows that fail only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestrator.engine.common.boundary.clipping import factor_for
from orchestrator.engine.common.boundary.loss_scale import LossScale
from orchestrator.engine.common.boundary.loss_sums import LossSums
from orchestrator.engine.common.boundary.packed_sums import BAD_WEIGHT, NON_FINITE, Trailer
from orchestrator.engine.settings import AccumulationOptions
from orchestrator.errors import ConfigError, JobError, NonFiniteError

POLICIES = ("stop", "skip")
_NAMED = 3  # of what is named in a message, so many at most
_REMEDIES = (
    "the weights are still those before it. A lower schedule.base_lr or train.clip_norm may help; "
    "train.on_non_finite=skip leaves such updates out"
)


class UpdatePolicy:
    """What one accumulator's options say of windows that cannot be applied as they are.

    Args:
        options: its `clip_norm`, and its `on_non_finite` for a loss or gradient that is not finite.
        scale: the loss scale, which an overflow halves.
        gather: every rank's numbers, a row for each rank; collective.

    Raises:
        ConfigError: there is no such policy.
    """

    def __init__(
        self,
        options: AccumulationOptions,
        scale: LossScale,
        gather: Callable[[Sequence[float]], list[list[float]]],
    ) -> None:
        self._policy, self._clip_norm = options.on_non_finite, options.clip_norm
        if self._policy not in POLICIES:
            raise ConfigError(f"train.on_non_finite must be stop or skip, but is {self._policy!r}")
        self._scale, self._gather = scale, gather

    def losses_usable(self, update: int, totals: Trailer, sums: LossSums) -> bool:
        """Whether the gradient has to be looked at; False skips the update.

        Args:
            update: its number.
            totals: of all ranks.
            sums: where this rank's micro-steps went wrong.

        Raises:
            JobError: weights that cannot be divided by.
            NonFiniteError: a loss is not finite, and the policy is "stop".
        """
        if totals.flags[BAD_WEIGHT]:
            raise JobError(
                f"Loss.weight was negative or not finite in update {update}, first on "
                f"{self._where(sums.first_bad_weight)}; it must be 0 or more"
            )
        if totals.weight.value <= 0:
            raise JobError(
                f"the weights of update {update} add up to {totals.weight.value:g} over all ranks, "
                "and the gradient cannot be divided by that; is every token masked, or was "
                "there no micro-step?"
            )
        if totals.flags[NON_FINITE] and self._policy == "stop":
            raise NonFiniteError(
                f"the loss became NaN or infinite in update {update}, first on "
                f"{self._where(sums.first_non_finite)}; {_REMEDIES}"
            )
        return not totals.flags[NON_FINITE]

    def factor(
        self, update: int, weight: float, norm: float, named: Callable[[], list[str]]
    ) -> tuple[float, float] | None:
        """The averaged gradient's norm, and what the summed one is multiplied with; None skips.

        Args:
            update: its number.
            weight: what the sum is to be divided by, the loss scale aside.
            norm: of the summed gradient.
            named: gives the names of parameters with a gradient that is not finite, where they can
                be told; not called without need.

        Raises:
            NonFiniteError: the gradient is not finite, that is no overflow under float16, and the
                policy is "stop".
        """
        if norm < float("inf"):
            return factor_for(norm, weight * self._scale.scale, self._clip_norm)
        if self._scale.may_overflow:
            self._scale.overflowed()
        elif self._policy == "stop":
            names = named()
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            places = f", in {', '.join(names[:_NAMED])}{more}" if names else ""
            raise NonFiniteError(
                f"the loss of update {update} is finite, but the gradient became NaN or "
                f"infinite{places}; {_REMEDIES}"
            )
        return None

    def _where(self, step: int | None) -> str:
        """The ranks and their micro-steps, in words, equal on all ranks. Collective."""
        rows = self._gather([-1.0 if step is None else float(step)])
        places = [f"rank {rank}, micro-step {int(s)}" for rank, (s,) in enumerate(rows) if s >= 0]
        more = f" and {len(places) - _NAMED} more ranks" if len(places) > _NAMED else ""
        return "; ".join(places[:_NAMED]) + more
