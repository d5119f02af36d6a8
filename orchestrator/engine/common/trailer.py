"""The trailer: exact sums and flags of a window, which travel in the gradient's own reduction.

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
from collections.abc import Sequence
from struct import Struct
from typing import Any

from orchestrator.plan.wire import FLAGS, LIMBS, SUMS

UNIT_BITS = 96
"""Sums count in units of 2**-96."""

Units = int | float
"""A sum in units: an int, which adds up without rounding; a float once a part was NaN or infinite.
Both are added with `+`."""

WIDE, NARROW = 16, 8
"""Bits of a limb."""

MOST_RANKS = 65536
_UNIT_BITS_OF = {WIDE: UNIT_BITS, NARROW: 40}
_STRUCT_OF = {WIDE: Struct(f"<{LIMBS}H"), NARROW: Struct(f"<{LIMBS}B")}

WEIGHT, LOSS, DIGEST, DIGEST_SQUARED = range(SUMS)
"""Indices of a trailer's sums; those of the metrics follow."""

STOP, NON_FINITE, BAD_WEIGHT, USES_ALL, USES_CHANGED, NEWCOMERS = range(FLAGS)
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


def to_units(value: float) -> Units:
    """Return `value` in units, rounded once; NaN, infinite or as large as 2**900 it stays a float.

    >>> to_float(sum(map(to_units, (2.0**24, 1.0, 0.5, -0.25))))
    16777217.25
    """
    if abs(value) < 2.0**900:  # beyond, its units would not be a float any more
        return round(math.ldexp(value, UNIT_BITS))
    return math.nan if math.isnan(value) else math.copysign(math.inf, value)


def to_float(units: Units) -> float:
    """Return a sum, correctly rounded; NaN or infinite when a part was."""
    return units / (1 << UNIT_BITS) if isinstance(units, int) else units


def to_limbs(units: Units, bits: int = NARROW) -> list[float]:
    """Return a sum as `LIMBS` whole numbers below 2**bits in size, the least significant first.

    It is rounded to the unit that goes with `bits`, and infinite where it reaches too far.
    """
    if isinstance(units, int):
        drop = UNIT_BITS - _UNIT_BITS_OF[bits]
        rounded = (units + (1 << drop >> 1)) >> drop
        sign, struct = (-1.0 if rounded < 0 else 1.0), _STRUCT_OF[bits]
        if not abs(rounded) >> (bits * LIMBS):
            limbs = struct.unpack(abs(rounded).to_bytes(struct.size, "little"))
            return [sign * limb for limb in limbs]
        units = sign * math.inf
    return [units] + [0.0] * (LIMBS - 1)


def from_limbs(limbs: Sequence[float], bits: int = NARROW) -> Units:
    """Return the sum of `limbs`, also of limbs that were added up over ranks."""
    if not math.isfinite(limbs[0]):
        return limbs[0]
    units = 0
    for limb in reversed(limbs):
        units = (units << bits) + int(limb)
    return units << (UNIT_BITS - _UNIT_BITS_OF[bits])


class Trailer:
    """Sums and flags of one rank's window, or after the reduction of all ranks'.

    Attributes:
        sums: in units; see `WEIGHT` and the following, then one for each metric.
        flags: see `STOP` and the following.
        steps: this rank's micro-steps.
        first_bad_weight, first_non_finite: this rank's first micro-steps with unusable values.
    """

    def __init__(self, metric_count: int = 0) -> None:
        self.sums: list[Units] = [0] * (SUMS + metric_count)
        self.flags = [0] * FLAGS
        self.steps = 0
        self.first_bad_weight: int | None = None
        self.first_non_finite: int | None = None

    @classmethod
    def from_losses(cls, losses: Sequence[float], metric_count: int) -> Trailer:
        """Sum the micro-steps of a window: weight, total and metrics of each, in their order."""
        trailer, width = cls(metric_count), 2 + metric_count
        trailer.steps = len(losses) // width
        for step in range(trailer.steps):
            weight, total, *metrics = losses[step * width : (step + 1) * width]
            if not (math.isfinite(weight) and weight >= 0):
                trailer.flags[BAD_WEIGHT] = 1
                if trailer.first_bad_weight is None:
                    trailer.first_bad_weight = step
                continue
            if not math.isfinite(total):
                trailer.flags[NON_FINITE] = 1
                if trailer.first_non_finite is None:
                    trailer.first_non_finite = step
            trailer.sums[WEIGHT] += to_units(weight)
            trailer.sums[LOSS] += to_units(total)
            for index, metric in enumerate(metrics, start=SUMS):
                trailer.sums[index] += to_units(metric)
        return trailer

    def add_digest(self, digest: int) -> None:
        """Add a digest of `DIGEST_BITS` bits; every rank does, or none."""
        self.sums[DIGEST] += digest << UNIT_BITS
        self.sums[DIGEST_SQUARED] += digest**2 << UNIT_BITS

    def digests_agree(self, ranks: int) -> bool:
        """Return whether all `ranks` ranks added the same digest; equal on all ranks.

        By the sums alone: R times the sum of squares is the square of the sum where all numbers are
        equal, and more than that where they are not (Cauchy and Schwarz).
        """
        total = int(self.sums[DIGEST]) >> UNIT_BITS
        return ranks * (int(self.sums[DIGEST_SQUARED]) >> UNIT_BITS) == total**2

    def numbers(self, bits: int = NARROW) -> list[float]:
        """Return `plan.wire.trailer_numbers` numbers; those of several ranks add up."""
        numbers: list[float] = []
        for units in self.sums:
            numbers += to_limbs(units, bits)
        return numbers + list(map(float, self.flags))

    @classmethod
    def from_numbers(cls, numbers: Sequence[float], bits: int = NARROW) -> Trailer:
        """Build the trailer of `numbers`, also of those of several ranks, added up."""
        trailer, limbs = cls(), numbers[:-FLAGS]
        trailer.sums = [
            from_limbs(limbs[start : start + LIMBS], bits) for start in range(0, len(limbs), LIMBS)
        ]
        trailer.flags = list(map(int, numbers[-FLAGS:]))
        return trailer

    def report(self, metric_names: Sequence[str]) -> dict[str, Any]:
        """Return the fields of a `BoundaryReport` that all ranks share, from the summed trailer."""
        weight, loss, _, _, *metrics = map(to_float, self.sums)
        named = zip(metric_names, metrics, strict=True)
        divisor = weight or math.nan  # the mean over nothing
        return {
            "loss": loss / divisor,
            "weight": weight,
            "metrics": {name: metric / divisor for name, metric in named},
            "stop_requested": self.flags[STOP] > 0,
            "newcomers": self.flags[NEWCOMERS] > 0,
        }
