"""The fast reduction: sums buckets of the flat buffers while the last backward computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from orchestrator.engine.api import Counters
from orchestrator.engine.common.boundary import Trailer, limb_bits
from orchestrator.engine.common.waiting import for_others
from orchestrator.engine.torch.buffers import GradientBuffers, Slice, bucket_slices
from orchestrator.engine.torch.group import BaseGroup, Work, to_floats
from orchestrator.errors import JobError

_CHUNK = 4096  # numbers summed in the gradient's own dtype before float64 takes over
_MANTISSA_BITS = {torch.float32: 24, torch.float64: 53}


@dataclass(slots=True)
class GradientNorm:
    """The 2-norm of numbers that come in flat pieces, computed as they come.

    Norms of chunks are added up in float64: as exact as float64 throughout, at a float32's price.
    The pieces are kept until `value`, since they may have to be looked at again.
    """

    _pieces: list[Tensor] = field(default_factory=list[Tensor])
    _norms: list[Tensor] = field(default_factory=list[Tensor])

    def add(self, piece: Tensor) -> None:
        """Take in a flat piece, on its device; nothing is waited for."""
        self._pieces.append(piece)
        whole = piece.numel() // _CHUNK * _CHUNK
        if whole:
            chunks = torch.linalg.vector_norm(piece[:whole].view(-1, _CHUNK), dim=1)
            self._norms.append(torch.linalg.vector_norm(chunks, dtype=torch.float64))
        self._norms.append(torch.linalg.vector_norm(piece[whole:], dtype=torch.float64))

    def value(self) -> float:
        """Return the norm; NaN or infinite when a number is."""
        norm = math.sqrt(sum([part * part for part in to_floats(self._norms)]))
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
        group: the ranks.
        bucket_bytes: size of a bucket; see `plan.wire.bucket_count`.
        overlap: False sends everything at the boundary.

    Attributes:
        buffers_made: sets of gradient buffers that exist.
        slices: the buckets.
        sent_apart: the last window's traffic on other groups than the accumulator's.
    """

    buffers_made = 1
    sent_apart = Counters()

    def __init__(
        self,
        buffers: GradientBuffers,
        group: BaseGroup,
        bucket_bytes: int | None,
        *,
        overlap: bool = True,
    ) -> None:
        self.buffers, self._group = buffers, group
        if buffers.metric_count is not None:
            mantissa_bits = _MANTISSA_BITS[buffers.trailer.dtype]
            self._limb_bits = limb_bits(mantissa_bits, group.size)
        self.slices = self._cut(bucket_bytes)
        self._buckets = [buffers.flats[buffer][start:end] for buffer, start, end in self.slices]
        # The gradients that arrive with each bucket, without trailer and padding.
        self._gradients = [
            buffers.gradients[buffer][start:end] for buffer, start, end in self._arriving()
        ]
        self._buckets_of = [
            [
                number
                for number, (buffer, start, end) in enumerate(self.slices)
                if buffer == place.buffer
                and start < place.start + place.count
                and place.start < end
            ]
            for place in buffers.places
        ]
        self._members = [0] * len(self.slices)
        for touched in self._buckets_of:
            for number in touched:
                self._members[number] += 1
        last, end_of_gradients = len(buffers.flats) - 1, buffers.gradients[-1].numel()
        trailer_in = [
            buffer == last and bool(buffers.trailer.numel()) and end > end_of_gradients
            for buffer, _, end in self.slices
        ]
        for number, waits in enumerate(trailer_in):  # the trailer is ready at the boundary only
            self._members[number] += waits
        # Buckets leave in their order: where the first one has the trailer, all wait for that.
        self._overlap = overlap and group.size > 1 and bool(self.slices) and not trailer_in[0]
        self._missing: list[int] = []  # gradients of each bucket that did not come yet
        self._seen: set[int] = set()
        self._under_way: list[Work] = []

    def _cut(self, bucket_bytes: int | None) -> list[Slice]:
        """Return the buckets."""
        return bucket_slices(self.buffers.payloads, bucket_bytes)

    def _arriving(self) -> list[Slice]:
        """Return the part of each bucket that this rank has the sum of."""
        return self.slices

    def begin(self, leaves: int | None) -> None:
        """Begin a window. `leaves` are for the reproducible reduction."""
        del leaves
        if self._under_way:
            raise RuntimeError(
                "a window begins while another one's gradients are on their way: after an error in "
                "the last backward this rank has to end, since the others wait for it"
            )
        self.buffers.begin()

    def before_backward(self, *, last: bool, leaf: int | None) -> Callable[[int], None] | None:
        """Prepare for a backward.

        Returns:
            A function to call for each gradient that has come: in a window's last backward it may
            complete a bucket, unless no bucket can leave early: on a lone rank, or with one
            bucket, which waits for the trailer.
        """
        del leaf
        self.buffers.check()
        if not (last and self._overlap):
            return None
        self._missing = list(self._members)
        self._seen.clear()
        return self._count_down

    def _count_down(self, parameter: int) -> None:
        """Send the buckets that a gradient completes.

        Raises:
            JobError: it had been there already, and is on its way to the other ranks.
        """
        if parameter in self._seen:
            if any(number < len(self._under_way) for number in self._buckets_of[parameter]):
                name = self.buffers.places[parameter].name
                raise JobError(
                    f"the gradient of {name} grew after it was sent: one backward reached it "
                    "twice, as with reentrant activation checkpoints around shared parameters. Use "
                    "checkpoint(..., use_reentrant=False), or Accumulator(..., overlap=False)"
                )
            return
        self._seen.add(parameter)
        for number in self._buckets_of[parameter]:
            self._missing[number] -= 1
        while len(self._under_way) < len(self._buckets) and not self._missing[len(self._under_way)]:
            self._send_next()

    def after_backward(self) -> None:
        """Check what the backward wrote. Buckets that are not ready leave at the boundary."""
        self.buffers.check()

    def finish(self, trailer: Trailer, norm: GradientNorm) -> Trailer:
        """Send the rest, wait for all sums, and return the summed trailer. Collective.

        Args:
            norm: takes in the summed gradient of each bucket while later ones still travel.

        Raises:
            PeerLost: a rank went away.
        """
        place = self.buffers.trailer
        place.copy_(torch.tensor(trailer.numbers(self._limb_bits), dtype=place.dtype))
        self._sum_buckets(norm)
        return Trailer.of(place.tolist(), self._limb_bits)

    def _sum_buckets(self, norm: GradientNorm) -> None:
        """Send what has not left yet, and wait for all sums."""
        while len(self._under_way) < len(self._buckets):
            self._send_next()
        under_way = zip(self._under_way, self._gradients, strict=True)
        for number, (work, gradients) in enumerate(under_way, start=1):
            with for_others("bucket %d of %d of the gradient", number, len(self._buckets)):
                work.wait()
            norm.add(gradients)
        self._under_way.clear()

    def _send_next(self) -> None:
        bucket = self._buckets[len(self._under_way)]
        self._under_way.append(self._group.all_reduce_sum_async(bucket, in_window=True))
