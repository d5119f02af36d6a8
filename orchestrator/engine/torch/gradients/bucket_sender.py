"""Sends the buckets of the flat buffers, in order, while the last backward still computes.

A bucket leaves as soon as every gradient in it is there and all buckets before it have left. The
order is fixed, so it is the same on all ranks whatever each of them computed. What holds the
trailer (the last bucket, as a rule) waits for the boundary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from orchestrator.engine.common.waiting import for_others
from orchestrator.engine.torch.comm.base_group import BaseGroup, Done, Work
from orchestrator.engine.torch.gradients.buffer import GradientBuffers
from orchestrator.engine.torch.gradients.layout import bucket_slices
from orchestrator.errors import JobError


class BucketSender:
    """One reduction of the buffers at a time.

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
        """How many buckets have left and were not waited for."""
        return len(self._under_way)

    def arm(self) -> bool:
        """Send buckets as gradients become ready from now on: the backward that follows is the
        last. Alone there is nobody to send to, and of one bucket that ends in the trailer nothing
        to send yet: then it is False, and nobody has to be told of gradients as they come.
        """
        if self._group.size == 1 or not self._any_early:
            return False
        self._missing = list(self._members)
        self._seen.clear()
        return True

    def ready(self, parameter: int) -> None:
        """A gradient is there. Called by the parameter's hook; does nothing unless armed.

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
        with self._group.silence.lifted():
            self._under_way.append(self._start(self.started))

    def _cut(self, bucket_bytes: int | None) -> list[tuple[int, int, int]]:
        """The buckets, as (buffer, start, end)."""
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
        return Done(work, lambda: bucket.copy_(rounded))
