"""The decision on an update, alike on all ranks: average, clip, skip or refuse; the loss scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orchestrator.engine.api import AccumulationOptions
from orchestrator.engine.common.trailer import (
    BAD_WEIGHT,
    LOSS,
    NON_FINITE,
    WEIGHT,
    Trailer,
    to_float,
)
from orchestrator.errors import ConfigError, JobError, NonFiniteError
from orchestrator.rundir.warnings import warn
from orchestrator.units import first_few

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
        """Return the state for a checkpoint; nothing where it is always 1."""
        return {"scale": self.scale, "calm": self._calm} if self._scales else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned, perhaps with another precision."""
        if self._scales and state:
            self.scale, self._calm = float(state["scale"]), int(state["calm"])


# ------------------------------------------------------------------ Decision
# The trailer tells every rank *that* a value is not finite. Only in such a window do ranks exchange
# *where*, with one more collective.


EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_, so that clipping agrees with it
_NAMED = 3  # ranks or parameters in a message
_REMEDIES = (
    "the weights are still those before it. A lower schedule.base_lr or train.clip_norm may help; "
    "train.on_non_finite=skip leaves such updates out"
)


class UpdatePolicy:
    """Decide whether a window is applied: average, clip, skip or refuse, on all ranks alike.

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
        if self._policy not in ("stop", "skip"):
            raise ConfigError(f"train.on_non_finite must be stop or skip, but is {self._policy!r}")
        self._scale, self._gather = scale, gather

    def norm_and_factor(
        self,
        update: int,
        totals: Trailer,
        own: Trailer,
        norm: float,
        named: Callable[[], list[str]],
        *,
        divided_by: float = 1.0,
    ) -> tuple[float, float] | None:
        """Return the averaged gradient's norm, and the factor for the summed one; None skips.

        An update in which nothing counts (all of its tokens are masked, say) is skipped.

        Args:
            totals: of all ranks.
            own: of this rank; it knows where its micro-steps went wrong.
            norm: of the summed gradient.
            named: gives the names of parameters with a gradient that is not finite, where they are
                known; called only when needed.
            divided_by: what the losses were divided by already.

        Raises:
            JobError: weights that cannot be divided by.
            NonFiniteError: a loss or the gradient is not finite, that is no overflow under float16,
                and the policy is "stop".
        """
        if totals.flags[BAD_WEIGHT]:
            raise JobError(
                f"Loss.weight was negative or not finite in update {update}, first on "
                f"{self._where(own.first_bad_weight)}; it must be 0 or more"
            )
        weight = to_float(totals.sums[WEIGHT])
        if totals.sums[WEIGHT] == 0 and totals.sums[LOSS] == 0:
            if not any(steps > 0 for (steps,) in self._gather([float(own.steps)])):
                raise JobError(
                    f"the weights of update {update} add up to 0 over all ranks: no rank had a "
                    "micro-step in it"
                )
            warn(
                f"the weights of update {update} add up to 0 over all ranks (all of its tokens "
                "are masked, say), so it changes nothing and is skipped; where that is not meant, "
                "look at what Loss.weight counts",
                kind="an update without weight",
            )
            return None
        if totals.flags[NON_FINITE] and self._policy == "skip":
            return None
        if not 0 < weight < float("inf"):  # beyond what the trailer carries it arrives infinite
            raise JobError(
                f"the weights of update {update} add up to {weight:g} over all ranks, and the "
                f"losses to {to_float(totals.sums[LOSS]):g}, which cannot be divided by that: "
                "what is masked counts 0 in Loss.total and Loss.weight alike"
            )
        if totals.flags[NON_FINITE]:
            raise NonFiniteError(
                f"the loss became NaN or infinite in update {update}, first on "
                f"{self._where(own.first_non_finite)}; {_REMEDIES}"
            )
        if norm < float("inf"):
            divisor = weight / divided_by * self._scale.scale
            averaged = norm / divisor
            if self._clip_norm is None:
                return averaged, 1.0 / divisor
            return averaged, min(1.0, self._clip_norm / (averaged + EPSILON)) / divisor
        if self._scale.scale > 1.0:  # the scale's fault, perhaps
            self._scale.overflowed()
        elif self._policy == "stop":
            names = named()
            where = f", in {first_few(names, _NAMED)}" if names else ""
            raise NonFiniteError(
                f"the loss of update {update} is finite, but the gradient became NaN or "
                f"infinite{where}; {_REMEDIES}"
            )
        return None

    def _where(self, step: int | None) -> str:
        """Return the ranks and their micro-steps, as text, equal on all ranks. Collective."""
        rows = self._gather([-1.0 if step is None else float(step)])
        places = [f"rank {rank}, micro-step {int(s)}" for rank, (s,) in enumerate(rows) if s >= 0]
        if not places:  # only in a model whose parts are on several ranks
            return "another part of the model"
        return first_few(places, _NAMED, noun="ranks", separator="; ")
