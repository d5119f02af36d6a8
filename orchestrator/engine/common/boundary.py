"""Sums and flags that travel in the gradient's own reduction, and what all ranks decide from them.

A trailer holds the sums of weight, loss and metrics, six flags, and the sums of a weights digest
and of its square, which tell whether all ranks hold the same weights. A sum is a fixed-point
integer cut into 12 signed limbs, small enough for the limbs of all ranks to add up without
rounding, in any order. So token counts above 2**24 are exact in float32 as well, and the bits of
the loss do not depend on which rank computed what.

| numbers are | ranks | bits of a limb | unit | reaches |
|---|---|---|---|---|
| float64, or float32 | 65536, or 256 | 16 | 2**-96 | 2**96 |
| float32 | 65536 | 8 | 2**-40 | 2**56 |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Any

from orchestrator.engine.api import AccumulationOptions
from orchestrator.errors import ConfigError, JobError, NonFiniteError
from orchestrator.plan.wire import FLAGS, LIMBS, trailer_numbers

UNIT_BITS = 96
"""An `ExactSum` counts in units of 2**-96."""

WIDE, NARROW = 16, 8
"""Bits of a limb."""

MOST_RANKS = 65536
_UNIT_BITS_OF = {WIDE: UNIT_BITS, NARROW: 40}
_PLACES_OF = {WIDE: Struct(f"<{LIMBS}H"), NARROW: Struct(f"<{LIMBS}B")}

STOP, NON_FINITE, BAD_WEIGHT, USES_ALL, USES_CHANGED, NEWCOMERS = range(6)
"""Flags, each a number of ranks: asked to stop; a loss that is not finite; a weight that is
negative or not finite; every parameter had a gradient; the set of those that had differs from the
last exchanged one; new ranks wait to join."""

DIGEST_BITS = 26
"""Of a digest that a trailer carries: its square is a whole float, and within a sum's reach."""


def limb_bits(mantissa_bits: int, ranks: int) -> int:
    """Bits of a limb, for which limbs of `ranks` ranks add up exactly in floats of this mantissa.

    >>> limb_bits(24, 256), limb_bits(24, 257), limb_bits(53, 65536)
    (16, 8, 16)
    """
    return WIDE if WIDE + (ranks - 1).bit_length() <= mantissa_bits else NARROW


@dataclass(slots=True)
class ExactSum:
    """A sum of floats, each rounded to a multiple of 2**-96 once; adding up never rounds.

    `odd` takes what is not finite: it wins over the units, and travels too.

    >>> total = ExactSum()
    >>> for value in (2.0**24, 1.0, 0.5, -0.25):
    ...     total.add(value)
    >>> total.value
    16777217.25
    """

    units: int = 0
    odd: float = 0.0

    def add(self, value: float) -> None:
        """Add `value`. One that is NaN, infinite or as large as 2**900 makes the sum so."""
        if not abs(value) < 2.0**900:  # its units would not be a float any more
            self.odd += math.nan if math.isnan(value) else math.copysign(math.inf, value)
        else:
            self.units += round(math.ldexp(value, UNIT_BITS))

    @property
    def value(self) -> float:
        """The sum, correctly rounded; NaN or infinite when a part was."""
        return self.units / (1 << UNIT_BITS) if self.odd == 0 else self.odd

    def limbs(self, bits: int = NARROW) -> list[float]:
        """Return the sum as `LIMBS` whole numbers below 2**bits in size, the least significant
        first.

        It is rounded to the unit that goes with `bits`, and infinite where it reaches too far.
        """
        drop = UNIT_BITS - _UNIT_BITS_OF[bits]
        rounded = (self.units + (1 << drop >> 1)) >> drop
        odd = self.odd
        if odd == 0 and abs(rounded) >> (bits * LIMBS):
            odd = math.copysign(math.inf, rounded)
        if odd != 0:
            return [odd] + [0.0] * (LIMBS - 1)
        sign, places = (-1.0 if rounded < 0 else 1.0), _PLACES_OF[bits]
        return [sign * limb for limb in places.unpack(abs(rounded).to_bytes(places.size, "little"))]

    @classmethod
    def of(cls, limbs: Sequence[float], bits: int = NARROW) -> ExactSum:
        """Build the sum of `limbs`, also of limbs that were added up over ranks."""
        odd = [limb for limb in limbs if not math.isfinite(limb)]
        if odd:
            return cls(0, odd[0])
        units = sum(int(limb) << (bits * place) for place, limb in enumerate(limbs))
        return cls(units << (UNIT_BITS - _UNIT_BITS_OF[bits]))


@dataclass(slots=True)
class Trailer:
    """Sums and flags of one rank's window, or after the reduction of all ranks'.

    Attributes:
        first_bad_weight, first_non_finite: this rank's first micro-steps with unusable values.
    """

    weight: ExactSum = field(default_factory=ExactSum)
    loss: ExactSum = field(default_factory=ExactSum)
    metrics: tuple[ExactSum, ...] = ()
    flags: list[int] = field(default_factory=lambda: [0] * FLAGS)
    digest: ExactSum = field(default_factory=ExactSum)
    digest_squared: ExactSum = field(default_factory=ExactSum)
    first_bad_weight: int | None = None
    first_non_finite: int | None = None

    @classmethod
    def of_losses(cls, losses: Iterable[Sequence[float]], metric_count: int) -> Trailer:
        """Sum the micro-steps of a window: weight, total and metrics of each, in their order."""
        trailer = cls(metrics=tuple(ExactSum() for _ in range(metric_count)))
        for step, (weight, total, *metrics) in enumerate(losses):
            if not (math.isfinite(weight) and weight >= 0):
                trailer.flags[BAD_WEIGHT] = 1
                if trailer.first_bad_weight is None:
                    trailer.first_bad_weight = step
                continue
            if not math.isfinite(total):
                trailer.flags[NON_FINITE] = 1
                if trailer.first_non_finite is None:
                    trailer.first_non_finite = step
            trailer.weight.add(weight)
            trailer.loss.add(total)
            for metric, value in zip(trailer.metrics, metrics, strict=True):
                metric.add(value)
        return trailer

    def add_digest(self, digest: int) -> None:
        """Add a digest of `DIGEST_BITS` bits; every rank does, or none."""
        self.digest.add(digest)
        self.digest_squared.add(digest**2)

    def digests_agree(self, ranks: int) -> bool:
        """Return whether all `ranks` ranks added the same digest; equal on all ranks.

        By the sums alone: R times the sum of squares is the square of the sum where all numbers are
        equal, and more than that where they are not (Cauchy and Schwarz).
        """
        total, squares = self.digest.units >> UNIT_BITS, self.digest_squared.units >> UNIT_BITS
        return ranks * squares == total**2

    def numbers(self, bits: int = NARROW) -> list[float]:
        """Return `trailer_numbers(metric_count)` numbers; those of several ranks add up."""
        numbers: list[float] = []
        for one in (self.weight, self.loss, self.digest, self.digest_squared, *self.metrics):
            numbers += one.limbs(bits)
        return numbers + [float(flag) for flag in self.flags]

    @classmethod
    def of(cls, numbers: Sequence[float], metric_count: int, bits: int = NARROW) -> Trailer:
        """Build the trailer of `numbers`. Raises `ValueError` unless there are as many as
        expected.
        """
        if len(numbers) != trailer_numbers(metric_count):
            raise ValueError(
                f"a trailer with {metric_count} metrics has {trailer_numbers(metric_count)} "
                f"numbers, but {len(numbers)} are given"
            )
        weight, loss, digest, squared, *metrics = [
            ExactSum.of(numbers[place : place + LIMBS], bits)
            for place in range(0, len(numbers) - FLAGS, LIMBS)
        ]
        flags = [int(flag) for flag in numbers[-FLAGS:]]
        return cls(weight, loss, tuple(metrics), flags, digest, squared)

    def report(self, metric_names: Sequence[str]) -> dict[str, Any]:
        """Return the fields of a `BoundaryReport` that all ranks share, from the summed trailer."""
        weight = self.weight.value
        metrics = zip(metric_names, self.metrics, strict=True)
        return {
            "loss": self.loss.value / weight,
            "weight": weight,
            "metrics": {name: total.value / weight for name, total in metrics},
            "stop_requested": self.flags[STOP] > 0,
            "newcomers": self.flags[NEWCOMERS] > 0,
        }


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

    def losses_usable(self, update: int, totals: Trailer, mine: Trailer) -> bool:
        """Return whether the losses are usable; False skips the update.

        Args:
            update: its number.
            totals: of all ranks.
            mine: of this rank; it knows where its micro-steps went wrong.

        Raises:
            JobError: weights that cannot be divided by.
            NonFiniteError: a loss is not finite, and the policy is "stop".
        """
        if totals.flags[BAD_WEIGHT]:
            raise JobError(
                f"Loss.weight was negative or not finite in update {update}, first on "
                f"{self._where(mine.first_bad_weight)}; it must be 0 or more"
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
                f"{self._where(mine.first_non_finite)}; {_REMEDIES}"
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
            divisor = weight * self._scale.scale
            averaged = norm / divisor
            if self._clip_norm is None:
                return averaged, 1.0 / divisor
            return averaged, min(1.0, self._clip_norm / (averaged + EPSILON)) / divisor
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
