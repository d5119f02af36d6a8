"""The reduction for an optimizer in shards: every rank gets the sum of its own segments alone.

A bucket is R equal segments, and rank r owns the r-th of each. What reduces a bucket is a
reduce-scatter, half of an all-reduce; the other half, a gather, is of the weights, once their
owners have stepped them (`pieces.py`). The trailer does not travel with the gradient, of which no
rank has all, but in one small gather: each rank's row of exact sums, and the norm of its segments.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from orchestrator.engine.common.boundary.packed_sums import WIDE, Trailer
from orchestrator.engine.torch.comm.base_group import BaseGroup, Work
from orchestrator.engine.torch.gradients.at_boundary import AtBoundary
from orchestrator.engine.torch.gradients.bucket_sender import BucketSender
from orchestrator.engine.torch.gradients.buffer import GradientBuffers
from orchestrator.engine.torch.gradients.gradient_norm import GradientNorm
from orchestrator.engine.torch.gradients.layout import bucket_slices, segment_of


class SegmentSender(BucketSender):
    """Sends buckets as `BucketSender` does, to leave each rank with the sum of its segments.

    Args:
        buffers: without a trailer, padded to a multiple of the ranks.
        group: the ranks.
        bucket_bytes: size of a bucket, up to rounding to whole segments.
    """

    def __init__(
        self, buffers: GradientBuffers, group: BaseGroup, bucket_bytes: int | None
    ) -> None:
        super().__init__(buffers, group, bucket_bytes)
        owned = [segment_of(bucket, group.rank, group.size) for bucket in self.slices]
        self._segments = [buffers.flats[buffer][start:end] for buffer, start, end in owned]
        self._gradients = [  # what arrives: the same without padding
            buffers.gradients[buffer][start:end] for buffer, start, end in owned
        ]

    def _cut(self, bucket_bytes: int | None) -> list[tuple[int, int, int]]:
        return bucket_slices(self._buffers.flats, bucket_bytes, multiple_of=self._group.size)

    def _start(self, number: int) -> Work:
        return self._group.reduce_scatter_sum_async(self._segments[number], self._buckets[number])


class ShardedBoundary(AtBoundary):
    """One reduction for each window, of which every rank keeps its segments."""

    _sender: SegmentSender

    @property
    def slices(self) -> list[tuple[int, int, int]]:
        """The buckets, as (buffer, start, end)."""
        return self._sender.slices

    def finish(self, trailer: Trailer, arrived: Callable[[Tensor], None]) -> Trailer:
        """Send the rest, wait for this rank's sums, exchange rows.

        `arrived` is called with the norms of the ranks' segments, whose norm is the gradient's.
        """
        self._buffers.complete()
        self._sender.send_rest()
        norm = GradientNorm()
        self._sender.wait(norm.add)
        row = [*trailer.numbers(WIDE), norm.value()]
        rows = self._group.all_gather(
            torch.tensor([row], dtype=torch.float64, device=self._group.device)
        )
        arrived(rows[:, -1])
        # Limbs are whole numbers small enough for float64 to add up those of all ranks exactly.
        totals = rows[:, :-1].sum(0).tolist()
        return Trailer.of(totals, len(trailer.metrics), WIDE)
