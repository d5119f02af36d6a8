"""The fast reduction: sums buckets of the flat buffers while the last backward computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import mul

import torch
from torch import Tensor

from orchestrator.engine.api import Counters
from orchestrator.engine.common.trailer import Trailer, limb_bits
from orchestrator.engine.common.waiting import for_others
from orchestrator.engine.torch.buffers import GradientBuffers, Slice
from orchestrator.engine.torch.group import BaseGroup, Work, to_floats
from orchestrator.errors import JobError

_BLOCK = 4096  # numbers summed in the gradient's own dtype before float64 takes over
_MANTISSA_BITS = {torch.float32: 24, torch.float64: 53}


@dataclass(slots=True)
class GradientNorm:
    """The 2-norm of numbers that come in flat pieces, computed as they come.

    Norms of blocks are added up in float64: as exact as float64 throughout, at a float32's price.
    The pieces are kept until `value`, since they may have to be looked at again.
    """

    _pieces: list[Tensor] = field(default_factory=list[Tensor])
    _norms: list[Tensor] = field(default_factory=list[Tensor])

    def add(self, piece: Tensor) -> None:
        """Take in a flat piece, on its device; nothing is waited for."""
        self._pieces.append(piece)
        whole = piece.numel() // _BLOCK * _BLOCK
        if whole:
            blocks = torch.linalg.vector_norm(piece[:whole].view(-1, _BLOCK), dim=1)
            self._norms.append(torch.linalg.vector_norm(blocks, dtype=torch.float64))
        self._norms.append(torch.linalg.vector_norm(piece[whole:], dtype=torch.float64))

    def value(self) -> float:
        """Return the norm; NaN or infinite when a number is."""
        norms = to_floats(self._norms)
        norm = math.sqrt(sum(map(mul, norms, norms)))
        if not math.isfinite(norm) and all(bool(p.isfinite().all()) for p in self._pieces):
            # The squares overflowed, the numbers did not: scale by the largest.
            largest = max(float(p.abs().max()) for p in self._pieces if p.numel())
            scaled = [torch.linalg.vector_norm(p.double() / largest) for p in self._pieces]
            norm = largest * math.sqrt(sum(s * s for s in to_floats(scaled)))
        return norm


# ------------------------------------------------------------------ Reduction
# A bucket leaves as soon as every gradient in it is there and all buckets before it have left. The
# order is fixed, so it is the same on all ranks whatever each of them computed. The bucket with
# the trailer (the last one, as a rule) waits for the boundary.


class FastReduction:
    """One reduction for each window, its buckets sent during the last backward.

    Args:
        buffers: whose payloads are summed over ranks, in place.
        slices: the buckets, as `bucket_slices` cuts them.
        owned: the part of each bucket that this rank gets the sum of; by default all of it.
        overlap: False sends everything at the boundary.

    Attributes:
        buffers_made: sets of gradient buffers that exist.
        reduced: the part of each bucket that holds the summed gradient after `reduce`; without
            trailer and padding.
        replicate_traffic: the last window's traffic on other groups than the accumulator's.
    """

    buffers_made = 1
    replicate_traffic = Counters()

    def __init__(
        self,
        buffers: GradientBuffers,
        group: BaseGroup,
        slices: Sequence[Slice],
        *,
        overlap: bool,
        owned: Sequence[Slice] | None = None,
    ) -> None:
        self.buffers, self._group, self.slices = buffers, group, slices
        self.owned = slices if owned is None else owned
        self._limb_bits = limb_bits(_MANTISSA_BITS[buffers.trailer.dtype], group.size)
        self._buckets = [buffers.flats[buffer][start:end] for buffer, start, end in slices]
        self.reduced = [buffers.flat_grads[buffer][start:end] for buffer, start, end in self.owned]
        # The parameters with numbers in each bucket.
        self._members = [
            {number for number, slot in enumerate(buffers.slots) if any(slot.ranges_in([bucket]))}
            for bucket in slices
        ]
        # Autograd has a thread for each device, whose hooks would send at the same time.
        one_device = len({flat.device for flat in buffers.flats}) == 1
        self._early_buckets = 0  # may leave before the boundary, where the trailer is known
        if overlap and one_device and group.size > 1:
            trailer_start = len(buffers.flats) - 1, buffers.flat_grads[-1].numel()
            self._early_buckets = sum(
                (buffer, end) <= trailer_start or not buffers.trailer.numel()
                for buffer, _, end in slices
            )
        self._arrived: set[int] = set()  # parameters whose gradient came in the last backward
        self._in_flight: list[Work] = []

    def begin(self, leaves: int | None) -> None:
        """Begin a window. `leaves` are for the reproducible reduction."""
        del leaves
        if self._in_flight:
            raise RuntimeError(
                "a window begins while another one's gradients are on their way: after an error in "
                "the last backward this rank has to end, since the others wait for it"
            )
        self.buffers.begin()

    def before_backward(self, *, last: bool, leaf: int | None) -> Callable[[int], None] | None:
        """Prepare for a backward.

        Returns:
            A function to call for each gradient that has come: in a window's last backward it may
            complete a bucket. None where no bucket can leave early: in other backwards, on a lone
            rank, or with one bucket, which waits for the trailer.
        """
        del leaf
        self.buffers.check()  # who wrote since the last backward reads of it here
        if not (last and self._early_buckets):
            return None
        self._arrived.clear()
        return self._send_completed

    def _send_completed(self, parameter: int) -> None:
        """Send the buckets that a parameter's gradient completes."""
        sent = len(self._in_flight)
        if parameter in self._arrived and any(
            parameter in members for members in self._members[:sent]
        ):
            name = self.buffers.slots[parameter].name
            raise JobError(
                f"the gradient of {name} grew after it was sent: one backward reached it "
                "twice, as with reentrant activation checkpoints around shared parameters. Use "
                "checkpoint(..., use_reentrant=False), or Accumulator(..., overlap=False)"
            )
        self._arrived.add(parameter)
        while len(self._in_flight) < self._early_buckets:
            if not self._members[len(self._in_flight)] <= self._arrived:
                return
            self._send_next()

    def after_backward(self) -> None:
        """Do nothing: the next backward, or the boundary, checks what this one wrote."""

    def reduce(self, trailer: Trailer) -> tuple[Trailer, GradientNorm]:
        """Send the rest, and wait for all sums. Collective.

        Returns:
            The sums of the ranks' trailers, and the norm of the summed gradient.

        Raises:
            PeerLost: a rank went away.
        """
        numbers = self.buffers.trailer
        numbers.copy_(torch.tensor(trailer.numbers(self._limb_bits), dtype=numbers.dtype))
        norm = self._reduce_buckets()
        return Trailer.from_numbers(numbers.tolist(), self._limb_bits), norm

    def non_finite(self) -> list[str]:
        """Return the parameters whose summed gradient holds NaN or infinity. Not collective."""
        return self.buffers.non_finite()

    def _reduce_buckets(self) -> GradientNorm:
        """Send the buckets that have not left yet, and wait for all sums.

        Returns:
            The norm of this rank's part of the sum, computed while later buckets still travel.
        """
        norm = GradientNorm()
        while len(self._in_flight) < len(self._buckets):
            self._send_next()
        in_flight = zip(self._in_flight, self.reduced, strict=True)
        for number, (work, gradient) in enumerate(in_flight, start=1):
            with for_others("bucket %d of %d of the gradient", number, len(self._buckets)):
                work.wait()
            norm.add(gradient)
        self._in_flight.clear()
        return norm

    def _send_next(self) -> None:
        bucket = self._buckets[len(self._in_flight)]
        self._in_flight.append(self._group.all_reduce_sum_async(bucket, in_window=True))
