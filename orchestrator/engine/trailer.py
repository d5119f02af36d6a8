"""Numbers that ride along in the gradient's own reduction, exactly.

A trailer holds the sums of weight, loss and metrics and six flags. A sum is kept as a fixed-point
integer in units of 2**-40, cut into 12 signed limbs of base 2**8 (so it reaches 2**56). Each limb
is at most 255 in size, so up to 65536 ranks add up to at most 2**24: exact in float32, in any
order. Token counts above 2**24 come out exact, and the bits of the loss do not depend on who
computed what.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.plan.wire import FLAGS, LIMBS, trailer_numbers

UNIT_BITS = 40
LIMB_BITS = 8
MOST_RANKS = 65536
LARGEST = 2.0 ** (LIMB_BITS * LIMBS - UNIT_BITS)
"""What is this large or larger travels as infinite."""

STOP, NON_FINITE, BAD_WEIGHT, USES_ALL, USES_CHANGED = range(5)
"""Flags, each a number of ranks: asked to stop; a loss that is not finite; a weight that is
negative or not finite; every parameter had a gradient; the set of those that had differs from the
last one told.
"""


@dataclass(slots=True)
class ExactSum:
    """A sum of floats, each rounded to a multiple of 2**-40 once; adding up never rounds.

    `odd` takes what is not finite (or too large): it wins over the units, and travels too.

    >>> total = ExactSum()
    >>> for value in (2.0**24, 1.0, 0.5, -0.25):
    ...     total.add(value)
    >>> total.value
    16777217.25
    """

    units: int = 0
    odd: float = 0.0

    def add(self, value: float) -> None:
        """Add `value`. NaN, infinite and too large ones make the sum so."""
        if not math.isfinite(value):
            self.odd += value
        elif abs(value) >= LARGEST:
            self.odd += math.copysign(math.inf, value)
        else:
            self.units += round(math.ldexp(value, UNIT_BITS))
            if abs(self.units) >= 1 << (LIMB_BITS * LIMBS):
                self.odd += math.copysign(math.inf, self.units)

    def merge(self, other: ExactSum) -> None:
        """Add another sum."""
        self.units += other.units
        self.odd += other.odd

    @property
    def value(self) -> float:
        """The sum, correctly rounded; NaN or infinite when a part was."""
        return self.units / (1 << UNIT_BITS) if self.odd == 0 else self.odd

    def limbs(self) -> list[float]:
        """The sum as `LIMBS` numbers of size 255 at most, the least significant first."""
        if self.odd != 0:
            return [self.odd] + [0.0] * (LIMBS - 1)
        sign, rest = (-1.0 if self.units < 0 else 1.0), abs(self.units)
        mask = (1 << LIMB_BITS) - 1
        return [sign * (rest >> (LIMB_BITS * place) & mask) for place in range(LIMBS)]

    @classmethod
    def of(cls, limbs: Sequence[float]) -> ExactSum:
        """The inverse of `limbs`, also of limbs that were added up over ranks."""
        odd = [limb for limb in limbs if not math.isfinite(limb)]
        if odd:
            return cls(0, math.fsum(odd) if len(odd) == 1 else math.nan)
        return cls(sum(int(limb) << (LIMB_BITS * place) for place, limb in enumerate(limbs)))


@dataclass(slots=True)
class Trailer:
    """What one rank, or after the reduction all of them, have to say of a window."""

    weight: ExactSum = field(default_factory=ExactSum)
    loss: ExactSum = field(default_factory=ExactSum)
    metrics: tuple[ExactSum, ...] = ()
    flags: list[int] = field(default_factory=lambda: [0] * FLAGS)

    @classmethod
    def empty(cls, metric_count: int) -> Trailer:
        """The trailer of a rank without samples."""
        return cls(metrics=tuple(ExactSum() for _ in range(metric_count)))

    def add(self, other: Trailer) -> None:
        """Add what another rank has to say."""
        self.weight.merge(other.weight)
        self.loss.merge(other.loss)
        for ours, theirs in zip(self.metrics, other.metrics, strict=True):
            ours.merge(theirs)
        self.flags = [a + b for a, b in zip(self.flags, other.flags, strict=True)]

    def numbers(self) -> list[float]:
        """`trailer_numbers(metric_count)` numbers; those of several ranks may be added up."""
        sums = (self.weight, self.loss, *self.metrics)
        return [limb for total in sums for limb in total.limbs()] + [float(f) for f in self.flags]

    @classmethod
    def of(cls, numbers: Sequence[float], metric_count: int) -> Trailer:
        """The inverse of `numbers`. Raises `ValueError` when there are not as many as expected."""
        if len(numbers) != trailer_numbers(metric_count):
            raise ValueError(
                f"a trailer with {metric_count} metrics has {trailer_numbers(metric_count)} "
                f"numbers, but {len(numbers)} are given"
            )
        sums = [
            ExactSum.of(numbers[place : place + LIMBS])
            for place in range(0, len(numbers) - FLAGS, LIMBS)
        ]
        flags = [int(flag) for flag in numbers[-FLAGS:]]
        return cls(sums[0], sums[1], tuple(sums[2:]), flags)
