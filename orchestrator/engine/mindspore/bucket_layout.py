"""The gradients as one flat buffer, cut into buckets: what travels at a boundary, in which pieces.

The layout is the plan's (`orchestrator.plan.wire`): all gradients in order, then the trailer, cut
into equal buckets, so the number of collectives is the planned one. Small tensors share a bucket;
of a large one a bucket is a slice, so that no copy of the whole is ever made at once. Pure
arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.plan.wire import bucket_count


@dataclass(frozen=True, slots=True)
class Piece:
    """Numbers `start` to `stop` of tensor `source`."""

    source: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How tensors of `sizes` numbers lie in buckets, and back.

    Attributes:
        buckets: the pieces of each bucket, in order.
        found: for each tensor, where its pieces are: (bucket, start, stop within the bucket).
    """

    sizes: tuple[int, ...]
    buckets: tuple[tuple[Piece, ...], ...]
    found: tuple[tuple[tuple[int, int, int], ...], ...]


def lay_out(sizes: Sequence[int], *, itemsize: int, bucket_bytes: int | None) -> Layout:
    """Cut tensors of `sizes` numbers, one after the other, into equal buckets.

    As many as the plan says (`plan.wire.bucket_count`), of whole numbers each.

    >>> lay_out([3, 5], itemsize=4, bucket_bytes=16).found
    (((0, 0, 3),), ((0, 3, 4), (1, 0, 4)))
    """
    total = sum(sizes)
    count = bucket_count(total * itemsize, bucket_bytes, early=False)
    width = math.ceil(total / count)
    buckets: list[list[Piece]] = [[] for _ in range(count)]
    found: list[list[tuple[int, int, int]]] = [[] for _ in sizes]
    place = 0
    for source, size in enumerate(sizes):
        start = 0
        while start < size:
            bucket, within = divmod(place, width)
            stop = min(size, start + width - within)
            buckets[bucket].append(Piece(source, start, stop))
            found[source].append((bucket, within, within + stop - start))
            place += stop - start
            start = stop
    return Layout(
        tuple(sizes), tuple(tuple(b) for b in buckets if b), tuple(tuple(f) for f in found)
    )
