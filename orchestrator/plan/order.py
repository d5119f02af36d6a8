"""The order in which the data set's samples are used: a pure function of (seed, update).

Nothing is drawn while training, so a resumed run, another number of ranks and another micro-batch
all see the same samples in the same update. The sample at a position of an epoch is computed from
the position alone, so a data set of any size costs the same memory: a Feistel cipher permutes the
numbers of 2h bits, the fewest that hold all positions of the N samples, and is applied until the
result is a sample ("cycle walking": Black and Rogaway, "Ciphers with arbitrary finite domains",
2002).

    (l, r) -> (r, l xor (mix(r + k_i) mod 2^h)),   i = 1 .. 8

Its keys k_i are the first 64-bit outputs of Philox4x64-10 keyed (seed, e) for epoch e, counter from
1 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011); `mix` is the finalizer of
SplitMix64 (Steele et al., "Fast splittable pseudorandom number generators", 2014). All of it is
arithmetic on integers, fixed by these algorithms: it depends on no version of numpy.

A data set of shards (`Shards`) is read along its shards: the cipher permutes the shards alone, and
each is read from its first sample to its last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

from orchestrator.errors import PlanError
from orchestrator.plan.batch import GLOBAL_BATCH

ROUNDS = 8
BLOCK = 1 << 16
"""Positions that are computed together: one at a time would cost more than the update."""

if TYPE_CHECKING:  # numpy is loaded on first use: a plan that is only printed does without it
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Shards:
    """A data set that is read shard after shard: sample i is the i-th of the shards' samples.

    The shards of an epoch, in the order of the cipher, are one long sequence. It is cut into lanes,
    and each update takes equally many samples of every lane, one lane after the other. So a rank,
    whose samples of an update are contiguous, reads its own lanes alone when ranks are at most as
    many as lanes, and the order depends on no number of ranks.

    Attributes:
        lengths: samples of each shard.
        lanes: shards that are read at the same time, over all ranks.
    """

    lengths: tuple[int, ...]
    lanes: int = 16
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Once: caches hash an order at each use, and there may be a million shards.
        object.__setattr__(self, "_hash", hash((self.lengths, self.lanes)))
        if not self.lengths or min(self.lengths) < 0 or sum(self.lengths) < 1:
            raise PlanError("shards must have lengths of 0 or more, and at least one sample")
        if self.lanes < 1:
            raise PlanError(f"lanes of shards must be 1 or more, but are {self.lanes}")

    def __hash__(self) -> int:
        return self._hash

    def samples_at(
        self, positions: NDArray[np.int64], global_batch: int, seed: int, epoch: int
    ) -> NDArray[np.int64]:
        """Return the sample at each of these positions of an epoch.

        Args:
            positions: int64, shape (n,).
        """
        import numpy as np  # late, so that `plan` stays fast

        lengths = np.array(self.lengths, dtype=np.int64)
        order = permuted(np.arange(len(lengths), dtype=np.uint64), len(lengths), seed, epoch)
        order = order.astype(np.int64)
        whole = int(lengths.sum()) // global_batch  # updates with all their samples
        update, position = np.divmod(positions, global_batch)
        begins = np.arange(self.lanes + 1) * global_batch // self.lanes  # of the lanes in an update
        lane = np.searchsorted(begins, position, side="right") - 1
        width = begins[lane + 1] - begins[lane]
        along = begins[lane] * whole + update * width + position - begins[lane]
        # The epoch's last samples are in no lane.
        along = np.where(update < whole, along, positions)
        ends = lengths[order].cumsum()
        nth = np.searchsorted(ends, along, side="right")
        shard = order[nth]
        first = lengths.cumsum() - lengths
        return first[shard] + along - (ends - lengths[order])[nth]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOrder:
    """The order of a run's samples. N is `dataset_samples`, G is `global_batch`.

    Attributes:
        dataset_samples: samples of the data set.
        global_batch: samples of a full update.
        ragged: the use of an epoch's last N mod G samples.
            `update`: they make a smaller update of their own. An update never crosses epochs, so
            none holds more than N samples, also when G > N (each epoch is then one update).
            `drop`: they are left out of this epoch (G > N is refused: nothing would remain).
            `carry`: the stream runs on into the next epoch, and every update has exactly G samples;
            with G > N an update spans epochs and holds some samples more than once.
        seed: 0 up to 2**63 - 1.
        shards: of a data set that is read along them; None: samples come in any order.

    Raises:
        PlanError: a data set without samples, `drop` with G > N, or shards of another number of
            samples.
    """

    dataset_samples: int
    global_batch: int
    ragged: str = "update"
    seed: int = 0
    shards: Shards | None = None

    def __post_init__(self) -> None:
        if self.shards and sum(self.shards.lengths) != self.dataset_samples:
            raise PlanError(
                f"the shards have {sum(self.shards.lengths)} samples, but the data set has "
                f"{self.dataset_samples}"
            )
        if self.dataset_samples < 1:
            raise PlanError(
                f"the data set has {self.dataset_samples} samples; it must have at least 1"
            )
        if self.ragged == "drop" and self.global_batch > self.dataset_samples:
            raise PlanError(
                f"accumulation.ragged=drop with {GLOBAL_BATCH}={self.global_batch} leaves nothing "
                f"of a data set of {self.dataset_samples} samples. Set {GLOBAL_BATCH}="
                f"{self.dataset_samples} or less, or accumulation.ragged=update or carry"
            )

    @property
    def updates_per_epoch(self) -> int:
        """Return one epoch's updates; with `carry`, the first's (later ones may have one less)."""
        if self.ragged == "drop":
            return self.dataset_samples // self.global_batch
        return -(-self.dataset_samples // self.global_batch)

    def updates_for(self, epochs: float) -> int:
        """Return the updates that `epochs` epochs take, rounded up to a whole number.

        With `carry` the last one is filled up from the epoch after, so that no sample is missed.

        >>> ragged = ("update", "drop", "carry")
        >>> [DataOrder(dataset_samples=10, global_batch=4, ragged=r).updates_for(2) for r in ragged]
        [6, 4, 5]
        """
        exact = Fraction(str(epochs))  # as written: 0.7 epochs of 10 updates are 7, not 8
        if self.ragged == "carry":
            return math.ceil(exact * self.dataset_samples / self.global_batch)
        return math.ceil(exact * self.updates_per_epoch)

    def epoch_of(self, update: int) -> int:
        """Return the epoch, from 0, that contains the update's first sample."""
        return self._first(update)[0]

    def samples_of(self, update: int) -> int:
        """Return how many samples the update has, without computing which."""
        _, position = self._first(update)
        if self.ragged == "carry":
            return self.global_batch
        return min(self.global_batch, self.dataset_samples - position)

    def indices(self, update: int, start: int = 0, count: int | None = None) -> NDArray[np.int64]:
        """Return the dataset's samples in the update's order: int64, (samples,), read-only.

        Args:
            start: position in the update of the first one to return.
            count: how many to return, at least one; None: all from `start` on. Only their blocks
                are computed.
        """
        import numpy as np  # late, so that `plan` stays fast

        epoch, position = self._first(update)
        missing = self.samples_of(update) - start if count is None else count
        epochs, position = divmod(position + start, self.dataset_samples)
        epoch += epochs
        parts: list[NDArray[np.int64]] = []
        while missing:
            number, start = divmod(position, BLOCK)
            block = _block(self, epoch, number)
            part = block[start : start + missing]
            parts.append(part)
            missing -= len(part)
            position += len(part)
            if position == self.dataset_samples:
                epoch, position = epoch + 1, 0
        if len(parts) == 1:
            return parts[0]
        joined = np.concatenate(parts)
        joined.flags.writeable = False
        return joined

    def _first(self, update: int) -> tuple[int, int]:
        """Return the epoch of the update's first sample, and its position in that epoch's order."""
        if self.ragged == "carry":
            return divmod(update * self.global_batch, self.dataset_samples)
        epoch, window = divmod(update, self.updates_per_epoch)
        return epoch, window * self.global_batch


@lru_cache(maxsize=2)
def _block(order: DataOrder, epoch: int, number: int) -> NDArray[np.int64]:
    """Return the samples at `BLOCK` positions of an epoch from `number * BLOCK` on, read-only."""
    import numpy as np  # late, so that `plan` stays fast

    first, samples = number * BLOCK, order.dataset_samples
    positions = np.arange(first, min(first + BLOCK, samples))
    if order.shards:
        found = order.shards.samples_at(positions, order.global_batch, order.seed, epoch)
    else:
        found = permuted(positions.astype(np.uint64), samples, order.seed, epoch).astype(np.int64)
    found.flags.writeable = False
    return found


def permuted(
    positions: NDArray[np.uint64], samples: int, seed: int, epoch: int
) -> NDArray[np.uint64]:
    """Return the sample at each of these positions of an epoch: the module's permutation.

    >>> import numpy as np
    >>> permuted(np.arange(5, dtype=np.uint64), samples=5, seed=0, epoch=0).tolist()
    [1, 3, 0, 4, 2]
    """
    import numpy as np  # late, so that `plan` stays fast

    half = max(1, ((samples - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    philox = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64))
    keys = philox.random_raw(ROUNDS)

    def encrypt(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = numbers >> shift, numbers & mask
        for key in keys:
            mixed = right + key
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
        return (left << shift) | right

    found = encrypt(positions)
    while (outside := found >= samples).any():
        found[outside] = encrypt(found[outside])
    return found
