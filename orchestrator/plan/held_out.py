"""The division of held-out data over ranks, for an evaluation by all of them.

Held-out data are cut into numbered *pieces* in their natural order, from lengths alone. Each rank
gets a contiguous run of whole pieces. A piece is computed alike on any rank, and exact sums of
pieces do not depend on who computed them, so an evaluation has the same bits on any ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from orchestrator.errors import PlanError
from orchestrator.plan.batch import Batch
from orchestrator.plan.split import even_parts
from orchestrator.plan.window import MicroBatch

COMMON_RANKS = 4
"""Up to so many ranks pieces have the same size in any mode."""

NO_UPDATE = -1
"""The update of held-out micro-batches: their random numbers are the same in each evaluation."""


class HeldOutPiece(NamedTuple):
    """Some held-out samples, from number `start` on, counted over all data sets. They are in data
    set number `data_set`.
    """

    data_set: int
    start: int
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutShare:
    """One rank's share of the held-out data.

    Attributes:
        pieces: this rank's, in order; () when it has none.
        padding: how many of the last pieces count nothing: they only keep ranks in step that hold
            one copy of a model together.
    """

    pieces: tuple[HeldOutPiece, ...]
    padding: int = 0

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield the micro-batch of each piece."""
        for _, start, samples in self.pieces:
            positions = range(start, start + samples)
            yield MicroBatch(update=NO_UPDATE, positions=positions, indices=tuple(positions))


def piece_size(
    batch: Batch, ranks: int, *, reduction: str = "fast", most_samples: int | None = None
) -> int:
    """Return the most samples of a piece: no more than memory is known to hold.

    In reproducible mode it is the leaf's size, and where lengths decide what a micro-step holds,
    `most_samples`: as many of the longest. Otherwise it is the size of the micro-batches on
    `COMMON_RANKS` ranks, or on the next power of two that `ranks` do not exceed.

    >>> [piece_size(Batch(global_batch=256, steps=4, micro_batch_cap=None), r) for r in (1, 4, 5)]
    [16, 16, 8]
    """
    if batch.steps is None:
        return min(most_samples or 1, batch.global_batch)
    cap = batch.micro_batch_cap or batch.global_batch
    if reduction == "reproducible":
        return min(cap, batch.global_batch)
    steps = batch.steps if batch.micro_batch_cap is None else 1
    common = max(COMMON_RANKS, 1 << (ranks - 1).bit_length())
    return max(1, min(cap, batch.global_batch // (common * steps)))


def cut_held_out(lengths: Sequence[int], size: int) -> tuple[HeldOutPiece, ...]:
    """Cut data sets of these lengths into pieces of `size` samples; each one's last may be shorter.

    >>> [tuple(piece) for piece in cut_held_out([3, 2], 2)]
    [(0, 0, 2), (0, 2, 1), (1, 3, 2)]
    """
    ends = list(accumulate(lengths, initial=0))
    return tuple(
        HeldOutPiece(number, start, min(size, ends[number + 1] - start))
        for number in range(len(lengths))
        for start in range(ends[number], ends[number + 1], size)
    )


def share_of(
    pieces: Sequence[HeldOutPiece],
    rank: int,
    ranks: int,
    *,
    shard_ranks: Sequence[int] = (),
    pieces_per_rank: Sequence[int] | None = None,
) -> HeldOutShare:
    """Return the share of one rank, by `pieces_per_rank` or else by an even division.

    Args:
        shard_ranks: see `RankWindows`: these ranks get equally many pieces, of which some count
            nothing.
        pieces_per_rank: how many pieces each rank gets (by cost, say).

    >>> pieces = cut_held_out([5], 2)
    >>> [[piece.start for piece in share_of(pieces, rank, 2).pieces] for rank in range(2)]
    [[0, 2], [4]]

    Raises:
        PlanError: `pieces_per_rank` is not of all pieces or not of all ranks.
    """
    counts = even_parts(len(pieces), ranks) if pieces_per_rank is None else pieces_per_rank
    if len(counts) != ranks or sum(counts) != len(pieces) or min(counts) < 0:
        raise PlanError(
            f"pieces_per_rank must divide {len(pieces)} pieces over {ranks} ranks, but is "
            f"{list(counts)}"
        )
    starts = list(accumulate(counts, initial=0))
    longest = max(shard_ranks, key=lambda other: counts[other], default=rank)
    padding = counts[longest] - counts[rank]
    own = pieces[starts[rank] : starts[rank + 1]]
    others = pieces[starts[longest] : starts[longest + 1]][counts[rank] :]
    return HeldOutShare(pieces=(*own, *others), padding=padding)
