"""The fast reduction: buckets of the flat buffers are summed while the last backward computes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from orchestrator.engine.common.packed_sums import Trailer, limb_bits
from orchestrator.engine.common.waiting import for_others
from orchestrator.engine.torch.buffers import GradientBuffers, bucket_slices
from orchestrator.engine.torch.group import BaseGroup, CompletedWork, Work
from orchestrator.errors import JobError

# ------------------------------------------------------------------ Gradient norm


_CHUNK = 4096  # numbers summed in the gradient's own dtype before float64 takes over
_HALVES = (torch.float16, torch.bfloat16)


class GradientNorm:
    """The 2-norm of numbers that come in flat pieces, computed as they come.

    Norms of chunks are added up in float64: as exact as float64 throughout, at a float32's price.
    The pieces are kept until `value`, since they may have to be looked at again.
    """

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []
        self._norms: list[Tensor] = []

    def add(self, piece: Tensor) -> None:
        """Take in a flat piece, on its device; nothing is waited for."""
        self._pieces.append(piece)
        whole = piece.numel() // _CHUNK * _CHUNK
        if whole:
            wide = torch.float32 if piece.dtype in _HALVES else None
            chunks = torch.linalg.vector_norm(piece[:whole].view(-1, _CHUNK), dim=1, dtype=wide)
            self._norms.append(torch.linalg.vector_norm(chunks, dtype=torch.float64))
        self._norms.append(torch.linalg.vector_norm(piece[whole:], dtype=torch.float64))

    def value(self) -> float:
        """Return the norm; NaN or infinite when a number is."""
        norm = math.sqrt(sum(part * part for part in _floats(self._norms)))
        if not math.isfinite(norm) and all(bool(p.isfinite().all()) for p in self._pieces):
            # The squares overflowed, the numbers did not: scale by the largest.
            largest = max(float(p.abs().max()) for p in self._pieces if p.numel())
            scaled = [torch.linalg.vector_norm(p.double() / largest) for p in self._pieces]
            norm = largest * math.sqrt(sum(s * s for s in _floats(scaled)))
        return norm


def _floats(numbers: list[Tensor]) -> list[float]:
    """With one transfer from each device."""
    if all(number.is_cpu for number in numbers):
        return [float(number) for number in numbers]
    found: list[float] = []
    for device in dict.fromkeys(number.device for number in numbers):
        found += torch.stack([n for n in numbers if n.device == device]).tolist()
    return found


# ------------------------------------------------------------------ Buckets
# A bucket leaves as soon as every gradient in it is there and all buckets before it have left. The
# order is fixed, so it is the same on all ranks whatever each of them computed. The bucket with
# the trailer (the last one, as a rule) waits for the boundary.


class BucketSender:
    """Sender of the buffers' buckets, for one reduction at a time.

    Args:
        buffers: whose payloads are summed over ranks, in place.
        group: the ranks.
        bucket_bytes: size of a bucket; see `plan.wire.bucket_count`.
        wire: what wider gradients travel, and are added up, as; None for their own type. The
            trailer is never rounded, so it then travels by itself.
    """

    def __init__(
        self,
        buffers: GradientBuffers,
        group: BaseGroup,
        bucket_bytes: int | None,
        wire: torch.dtype | None = None,
    ) -> None:
        self._buffers, self._group, self._wire = buffers, group, wire
        end_of_gradients = buffers.gradients[-1].numel()
        self.slices = slices = self._cut(bucket_bytes)
        self._buckets: list[Tensor] = [
            buffers.flats[buffer][start:end] for buffer, start, end in slices
        ]
        self._gradients = [  # the same without trailer and padding
            buffers.flats[buffer][start : min(end, buffers.gradients[buffer].numel())]
            for buffer, start, end in slices
        ]
        self._members = [0] * len(slices)
        self._buckets_of: list[list[int]] = []
        for place in buffers.places:
            touched = [
                number
                for number, (buffer, start, end) in enumerate(slices)
                if buffer == place.buffer
                and start < place.start + place.count
                and place.start < end
            ]
            self._buckets_of.append(touched)
            for number in touched:
                self._members[number] += 1
        for number, (buffer, _, end) in enumerate(slices):
            last = buffer == len(buffers.flats) - 1
            if last and end > end_of_gradients and buffers.trailer.numel():
                self._members[number] += 1  # the trailer, which is never ready before the boundary
        # Buckets leave in their order: where the first one has the trailer, all wait for that.
        self._any_early = bool(slices) and self._members[0] <= sum(
            0 in touched for touched in self._buckets_of
        )
        self._missing: list[int] | None = None
        self._seen: set[int] = set()
        self._under_way: list[Work] = []

    @property
    def started(self) -> int:
        """The number of buckets have left and were not waited for."""
        return len(self._under_way)

    def arm(self) -> bool:
        """Send buckets as gradients become ready from now on: the backward that follows is the
        last. Return False where no bucket can leave early: on a lone rank, or with one bucket,
        which waits for the trailer. Then gradients need not be reported as they come.
        """
        if self._group.size == 1 or not self._any_early:
            return False
        self._missing = list(self._members)
        self._seen.clear()
        return True

    def ready(self, parameter: int) -> None:
        """Note a gradient, for the parameter's hook; does nothing unless armed.

        Raises:
            JobError: it had been there already, and is on its way to the other ranks.
        """
        if self._missing is None:
            return
        if parameter in self._seen:
            self._ready_again(parameter)
            return
        self._seen.add(parameter)
        for number in self._buckets_of[parameter]:
            self._missing[number] -= 1
        while self.started < len(self._buckets) and self._missing[self.started] == 0:
            self._send_next()

    def _ready_again(self, parameter: int) -> None:
        if any(number < len(self._under_way) for number in self._buckets_of[parameter]):
            name = self._buffers.parameters[parameter][0]
            raise JobError(
                f"the gradient of {name} grew after it was sent: one backward reached it twice, as "
                "with reentrant activation checkpoints around shared parameters. Use "
                "checkpoint(..., use_reentrant=False), or Accumulator(..., overlap=False)"
            )

    def send_rest(self) -> None:
        """Send what has not left yet."""
        while len(self._under_way) < len(self._buckets):
            self._send_next()
        self._missing = None

    def wait(self, arrived: Callable[[Tensor], None] | None = None) -> None:
        """Return when every sum is there. Raises `PeerLost` when a rank went away.

        Args:
            arrived: called with the summed gradients of each bucket while later ones still travel.
        """
        under_way = zip(self._under_way, self._gradients, strict=True)
        for number, (work, gradients) in enumerate(under_way, start=1):
            with for_others("bucket %d of %d of the gradient", number, len(self._buckets)):
                work.wait()
            if arrived is not None:
                arrived(gradients)
        self._under_way.clear()

    def _send_next(self) -> None:
        with self._group.silence.suspended():
            self._under_way.append(self._start(self.started))

    def _cut(self, bucket_bytes: int | None) -> list[tuple[int, int, int]]:
        """Return the buckets, as (buffer, start, end)."""
        buffers = self._buffers
        if self._wire is None:
            return bucket_slices(buffers.payloads, bucket_bytes)
        slices = bucket_slices(buffers.gradients, bucket_bytes, self._wire.itemsize)
        last = len(buffers.payloads) - 1
        trailer = (last, buffers.gradients[last].numel(), buffers.payloads[last].numel())
        return [*slices, trailer]

    def _start(self, number: int) -> Work:
        bucket = self._buckets[number]
        wire = self._wire if self._gradients[number].numel() else None
        if wire is None or bucket.element_size() <= wire.itemsize:
            return self._group.all_reduce_sum_async(bucket)
        rounded = bucket.to(wire)
        work = self._group.all_reduce_sum_async(rounded)
        return CompletedWork(work, lambda: bucket.copy_(rounded))


# ------------------------------------------------------------------ Reduction


_MANTISSA_BITS = {torch.float32: 24, torch.float64: 53}


def write_trailer(buffers: GradientBuffers, trailer: Trailer, ranks: int) -> None:
    """Put this rank's numbers behind its gradients."""
    place = buffers.trailer
    numbers = trailer.numbers(limb_bits(_MANTISSA_BITS[place.dtype], ranks))
    place.copy_(torch.tensor(numbers, dtype=place.dtype))


def read_trailer(buffers: GradientBuffers, ranks: int) -> Trailer:
    """Return the numbers behind the gradients, as a trailer."""
    place = buffers.trailer
    bits = limb_bits(_MANTISSA_BITS[place.dtype], ranks)
    return Trailer.of(place.tolist(), buffers.metric_count or 0, bits)


class FastReduction:
    """One reduction for each window, its buckets sent during the last backward.

    Args:
        overlap: False sends everything at the boundary.
    """

    def __init__(
        self,
        buffers: GradientBuffers,
        group: BaseGroup,
        sender: BucketSender,
        *,
        overlap: bool = True,
    ) -> None:
        self._buffers, self._group, self._overlap = buffers, group, overlap
        self._sender = sender

    @property
    def buffers(self) -> GradientBuffers:
        """The one set of buffers that there is."""
        return self._buffers

    @property
    def buffers_made(self) -> int:
        """One."""
        return 1

    @property
    def records(self) -> bool:
        """They only have to be in the buffers."""
        return True

    def begin(self, *, leaves: int | None) -> None:
        """Start from nothing."""
        del leaves
        if self._sender.started:
            raise RuntimeError(
                "a window begins while another one's gradients are on their way: after an error in "
                "the last backward this rank has to end, since the others wait for it"
            )
        self._buffers.begin()

    def before_backward(self, *, last: bool, leaf: int | None) -> bool:
        """Send during this backward if it is the last."""
        del leaf
        return last and self._overlap and self._sender.arm()

    def after_backward(self) -> None:
        """Nothing: buckets that are not ready leave at the boundary."""

    def ready(self, parameter: int) -> None:
        """Send the buckets that this one completes."""
        self._sender.ready(parameter)

    def finish(self, trailer: Trailer, arrived: Callable[[Tensor], None]) -> Trailer:
        """Send the rest, wait for all."""
        self._buffers.complete()
        write_trailer(self._buffers, trailer, self._group.size)
        self._sender.send_rest()
        self._sender.wait(arrived)
        return read_trailer(self._buffers, self._group.size)
