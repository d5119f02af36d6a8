"""Decide whether an update is applied: average, clip, skip or refuse, on all ranks alike.

The trailer tells every rank *that* a value is not finite. Only in such a window do ranks exchange
*where*, with one more collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orchestrator.engine.api import AccumulationOptions
from orchestrator.engine.common.packed_sums import BAD_WEIGHT, NON_FINITE, LossSums, Trailer
from orchestrator.errors import ConfigError, JobError, NonFiniteError

EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_, so that clipping agrees with it


def averaging_factor(norm: float, divisor: float, clip_norm: float | None) -> tuple[float, float]:
    """Return the norm of the averaged gradient, and the factor to multiply the summed one with.

    Args:
        norm: of the summed gradient.
        divisor: what the sum is to be divided by: the window's weight, times the loss scale.
        clip_norm: largest norm of the averaged gradient, or None.

    >>> averaging_factor(8.0, 4.0, None)
    (2.0, 0.25)
    """
    averaged = norm / divisor
    if clip_norm is None:
        return averaged, 1.0 / divisor
    return averaged, min(1.0, clip_norm / (averaged + EPSILON)) / divisor


# ------------------------------------------------------------------ Loss scale for float16
# The scale is a power of two, so scaling rounds nothing. Every micro-step of a window uses the
# same one; the boundary takes it out once, with the division by the weight. All ranks see an
# overflow in the same summed numbers: they skip the window and halve the scale alike.


FIRST_SCALE = 2.0**12  # below torch's 2**16, because sums are scaled here and not means
LARGEST_SCALE = 2.0**24
GROW_AFTER = 2000  # windows without overflow; as in torch.amp.GradScaler


class LossScale:
    """The scale of the present window; always 1 where `scales` is false.

    Attributes:
        scale: the factor of losses before the backward; 1 but for float16.
    """

    def __init__(self, *, scales: bool) -> None:
        self._scales = scales
        self.scale = FIRST_SCALE if scales else 1.0
        self._calm = 0

    def overflowed(self) -> None:
        """Halve the scale, after a skipped window."""
        self.scale, self._calm = max(1.0, self.scale / 2), 0

    def succeeded(self) -> None:
        """Count an applied window; after many of those, double the scale."""
        if not self._scales:
            return
        self._calm += 1
        if self._calm == GROW_AFTER:
            self.scale, self._calm = min(LARGEST_SCALE, self.scale * 2), 0

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"scale": self.scale, "calm": self._calm}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned."""
        self.scale, self._calm = float(state["scale"]), int(state["calm"])


# ------------------------------------------------------------------ Policy


POLICIES = ("stop", "skip")
_NAMED = 3  # of what is named in a message, so many at most
_REMEDIES = (
    "the weights are still those before it. A lower schedule.base_lr or train.clip_norm may help; "
    "train.on_non_finite=skip leaves such updates out"
)


class UpdatePolicy:
    """Policy for windows that cannot be applied as they are.

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
        """Return whether the losses are usable; False skips the update.

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
        """Return the averaged gradient's norm, and what the summed one is multiplied with; None
        skips.

        Args:
            update: its number.
            weight: what the sum is to be divided by, the loss scale aside.
            norm: of the summed gradient.
            named: gives the names of parameters with a gradient that is not finite, where they are
                known; called only when needed.

        Raises:
            NonFiniteError: the gradient is not finite, that is no overflow under float16, and the
                policy is "stop".
        """
        if norm < float("inf"):
            return averaging_factor(norm, weight * self._scale.scale, self._clip_norm)
        if self._scale.scale > 1.0:  # the scale's fault, perhaps
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
        """Return the ranks and their micro-steps, in words, equal on all ranks. Collective."""
        rows = self._gather([-1.0 if step is None else float(step)])
        places = [f"rank {rank}, micro-step {int(s)}" for rank, (s,) in enumerate(rows) if s >= 0]
        more = f" and {len(places) - _NAMED} more ranks" if len(places) > _NAMED else ""
        return "; ".join(places[:_NAMED]) + more
