"""Detection of weights that differ between ranks: each update checks a part of the model.

Ranks start alike and apply the same update, so they stay alike; unless something changes weights on
one of them only. Nothing would show that: gradients are averaged, the loss keeps falling, and
rank 0's weights are saved for all ranks. So a digest of one *partition* of the weights travels with
each boundary's reduction (`Trailer.add_digest`), another partition in each update, and all of
them are compared before a checkpoint and at the end. Where digests differ, all ranks raise the same
error, which takes one collective more.

No framework is imported here: an engine says how a piece of a parameter is digested.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.engine.common.trailer import DIGEST_BITS, Trailer
from orchestrator.errors import JobError, ReplicasDiffer
from orchestrator.units import named_ranks

MAX_PARTITIONS = 32
"""All weights are compared within so many updates."""

MIN_PARTITION_BYTES, EACH_PIECE = 256 * 1024, 32 * 1024
"""Smallest partition; overhead of a piece. In bytes."""

LARGEST_PIECE = 2**16
"""Numbers of a piece at the most, so that what is computed from it stays in the cache."""

VALUE_BITS = 48
"""Of a piece's digest: a float64 carries it exactly."""


@dataclass(frozen=True, slots=True)
class WeightRange:
    """Numbers `start` to `end` of a parameter, flat: the `number`-th of the model's."""

    number: int
    start: int
    end: int


def partition_weights(sizes: Sequence[int], itemsizes: Sequence[int]) -> list[list[WeightRange]]:
    """Cut the model into pieces, in their order, in at most `MAX_PARTITIONS` partitions of nearly
    equal work.

    Args:
        sizes: numbers of each parameter.
        itemsizes: bytes of one of them.

    >>> [len(partition) for partition in partition_weights([100, 2**20], [4, 4])]
    [2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    """
    pieces = [
        (WeightRange(number, start, min(start + LARGEST_PIECE, size)), itemsize)
        for number, (size, itemsize) in enumerate(zip(sizes, itemsizes, strict=True))
        for start in range(0, size, LARGEST_PIECE)
    ]
    costs = [EACH_PIECE + (piece.end - piece.start) * itemsize for piece, itemsize in pieces]
    largest = max(MIN_PARTITION_BYTES, -(-sum(costs) // MAX_PARTITIONS))
    partitions: list[list[WeightRange]] = [[]]
    reached = 0
    for (piece, _), cost in zip(pieces, costs, strict=True):
        if reached >= largest * len(partitions):
            partitions.append([])
        partitions[-1].append(piece)
        reached += cost
    return partitions


def folded(values: Sequence[Any], bits: int = VALUE_BITS) -> int:
    """Return one digest of `bits` bits of several digests or other values, by their repr."""
    digest = hashlib.blake2b(repr(list(values)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - bits)


class ReplicaChecker:
    """Detects weights that differ between ranks.

    Args:
        sizes, itemsizes: see `partition_weights`.
        digests: gives a number of up to 64 bits for each of some pieces, of the weights as they
            are now; any change of a piece changes its number.
        gather: every rank's numbers, a row for each rank; collective.
        ranks: how many there are; alone, nothing is done.
        numbers: theirs, for messages, where they are a part of all ranks.
        joint_digests: numbers for all of some pieces, which change with any of these, where fewer
            than one for each take less time; by default `digests`.
    """

    def __init__(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        itemsizes: Sequence[int],
        *,
        digests: Callable[[Sequence[WeightRange]], list[int]],
        gather: Callable[[Sequence[float]], list[list[float]]],
        ranks: int,
        numbers: Sequence[int] | None = None,
        joint_digests: Callable[[Sequence[WeightRange]], list[int]] | None = None,
    ) -> None:
        self._joint_digests = joint_digests or digests
        self._names, self._digests, self._gather, self._ranks = names, digests, gather, ranks
        self._numbers = numbers or range(ranks)
        self._partitions = partition_weights(sizes, itemsizes)
        self._update = -1  # the latest
        self._alike: list[int | None] = [None] * len(self._partitions)  # last before which update
        self._agreed: Mapping[str, float] = {}

    def write_digest(
        self, trailer: Trailer, update: int, agreed: Mapping[str, float] | None = None
    ) -> None:
        """Put this rank's digest of the update's partition into what travels. Not collective.

        Args:
            agreed: further numbers of this window that have to be the same on all ranks, by what
                they are: the same names on all of them.
        """
        self._update, self._agreed = update, agreed or {}
        if self._ranks > 1:
            digests = self._joint_digests(self._partitions[update % len(self._partitions)])
            values = [*map(float, self._agreed.values()), *digests]
            trailer.add_digest(folded(values, DIGEST_BITS))

    def check(self, totals: Trailer, update: int) -> None:
        """Check the summed trailer. Collective only where it raises.

        Raises:
            ReplicasDiffer: on all ranks alike, when weights differed before this update's step; it
                names ranks, the first parameter, and since when.
            JobError: on all ranks, when `agreed` numbers of this window differ.
        """
        index = update % len(self._partitions)
        if totals.digests_agree(self._ranks):
            self._alike[index] = update
            return
        # Digests differ as well where what is agreed does; that says more.
        rows = self._gather(list(self._agreed.values())) if self._agreed else [[]]
        if odd := minority_ranks(rows):
            usual = next(row for rank, row in enumerate(rows) if rank not in odd)
            name, odd_value, usual_value = next(
                (name, odd_value, usual_value)
                for name, odd_value, usual_value in zip(
                    self._agreed, rows[odd[0]], usual, strict=True
                )
                if odd_value != usual_value
            )
            raise JobError(
                f"ranks do not agree on update {update}: {name} is {odd_value:.17g} on "
                f"{named_ranks(odd)}, and {usual_value:.17g} on others; it has to be the same "
                f"on all ranks"
            )
        raise self._error(
            self._partitions[index], self._alike[index], f"the step of update {update}"
        )

    def check_all(self) -> None:
        """Compare all weights now, between two windows. Collective.

        Raises:
            ReplicasDiffer: as `check`.
        """
        if self._ranks == 1:
            return
        digests = [folded(self._digests(partition)) for partition in self._partitions]
        rows = self._gather([float(digest) for digest in digests])
        for index, partition in enumerate(self._partitions):
            if any(row[index] != rows[0][index] for row in rows):
                until = (
                    "the first update" if self._update < 0 else f"the end of update {self._update}"
                )
                raise self._error(partition, self._alike[index], until)
        self._alike = [self._update + 1] * len(self._partitions)

    def _error(
        self, pieces: Sequence[WeightRange], since: int | None, until: str
    ) -> ReplicasDiffer:
        """Return the error, in which all ranks name the same culprits. Collective."""
        rows = self._gather([float(folded([digest])) for digest in self._digests(pieces)])
        odd = [self._numbers[row] for row in minority_ranks(rows)]
        if not odd:
            return ReplicasDiffer(
                f"the sums of ranks' digests do not fit together at {until}, although the weights "
                "of all ranks are the same: the transport did not add up what they sent (torch's "
                "fake process group adds up nothing), so the gradient's sum is wrong, too",
                odd,
            )
        columns = zip(pieces, zip(*rows, strict=True), strict=True)
        first = next((piece for piece, column in columns if len(set(column)) > 1), None)
        begun = "the start" if since is None else f"the start of update {since}"
        where = "" if first is None else f", first in parameter {self._names[first.number]}"
        whose = f"rank {self._numbers[0]}" if self._ranks == 2 else "most ranks"
        return ReplicasDiffer(
            f"the weights of {named_ranks(odd)} are no longer those of {whose}{where}: they were "
            f"changed there alone, between {begun} and {until}. What a job does besides the "
            "optimizer's step (in after_update, say) must be the same on all ranks, and so must "
            "processors and numbers of threads, which decide the last bits",
            odd,
        )


def minority_ranks(rows: Sequence[Sequence[float]]) -> list[int]:
    """Return the ranks whose row is not the most common one; in a tie rank 0's counts as that."""
    counts = Counter(tuple(row) for row in rows)
    most = max(counts, key=lambda row: (counts[row], row == tuple(rows[0])))
    return [rank for rank, row in enumerate(rows) if tuple(row) != most]
