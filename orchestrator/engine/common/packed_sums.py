"""Exact sums that travel in the gradient's own reduction.

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Any

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
    """Sums and flags of one rank's window, or after the reduction of all ranks'."""

    weight: ExactSum = field(default_factory=ExactSum)
    loss: ExactSum = field(default_factory=ExactSum)
    metrics: tuple[ExactSum, ...] = ()
    flags: list[int] = field(default_factory=lambda: [0] * FLAGS)
    digest: ExactSum = field(default_factory=ExactSum)
    digest_squared: ExactSum = field(default_factory=ExactSum)

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

    def report(self, metric_names: Sequence[str]) -> dict[str, Any]:
        """Return the fields of a `BoundaryReport` that all ranks share, from the summed trailer.

        Args:
            metric_names: in the order in which metrics travel.
        """
        weight = self.weight.value
        metrics = zip(metric_names, self.metrics, strict=True)
        return {
            "loss": self.loss.value / weight,
            "weight": weight,
            "metrics": {name: total.value / weight for name, total in metrics},
            "stop_requested": self.flags[STOP] > 0,
            "newcomers": self.flags[NEWCOMERS] > 0,
        }

    @classmethod
    def of(cls, numbers: Sequence[float], metric_count: int, bits: int = NARROW) -> Trailer:
        """Build the trailer of `numbers`. Raises `ValueError` when there are not as many as
        expected.
        """
        if len(numbers) != trailer_numbers(metric_count):
            raise ValueError(
                f"a trailer with {metric_count} metrics has {trailer_numbers(metric_count)} "
                f"numbers, but {len(numbers)} are given"
            )
        sums = [
            ExactSum.of(numbers[place : place + LIMBS], bits)
            for place in range(0, len(numbers) - FLAGS, LIMBS)
        ]
        flags = [int(flag) for flag in numbers[-FLAGS:]]
        weight, loss, digest, squared, *metrics = sums
        return cls(weight, loss, tuple(metrics), flags, digest, squared)


# ------------------------------------------------------------------ Sums of a window's losses
# Values on a device stay there until the boundary, so a micro-step never waits for one.


class LossSums:
    """Losses of one window, in the order of micro-steps.

    Args:
        metric_count: how many metrics each has.
        to_floats: gives weight, total and metrics of each of some rows, and waits for them. A row
            is what the engine passes to `add`.

    Attributes:
        micro_steps: added since `begin`.
        first_non_finite, first_bad_weight: micro-steps with the first unusable values of this
            window, as of the last `trailer`.
    """

    def __init__(
        self,
        metric_count: int,
        to_floats: Callable[[Sequence[Any]], Iterable[Sequence[float]]],
    ) -> None:
        self._metric_count, self._to_floats = metric_count, to_floats
        self.begin()

    def begin(self) -> None:
        """Begin a window, from nothing."""
        self._rows: list[Any] = []
        self.micro_steps = 0
        self.first_non_finite: int | None = None
        self.first_bad_weight: int | None = None

    def add(self, row: Any) -> None:
        """Add a micro-step, without waiting for its values."""
        self._rows.append(row)
        self.micro_steps += 1

    def trailer(self) -> Trailer:
        """Return the exact sums since the last trailer, with flags for unusable values."""
        trailer = Trailer(metrics=tuple(ExactSum() for _ in range(self._metric_count)))
        first = self.micro_steps - len(self._rows)
        for step, (weight, total, *metrics) in enumerate(self._to_floats(self._rows), first):
            if not (math.isfinite(weight) and weight >= 0):
                trailer.flags[BAD_WEIGHT] = 1
                if self.first_bad_weight is None:
                    self.first_bad_weight = step
                continue
            if not math.isfinite(total):
                trailer.flags[NON_FINITE] = 1
                if self.first_non_finite is None:
                    self.first_non_finite = step
            trailer.weight.add(weight)
            trailer.loss.add(total)
            for metric, value in zip(trailer.metrics, metrics, strict=True):
                metric.add(value)
        self._rows.clear()
        return trailer
