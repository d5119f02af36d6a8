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

The place of an update in this order is a closed form of its number, within each stage of a batch
schedule: of a million updates none is counted one by one.
"""

from __future__ import annotations

import hashlib
import math
import shlex
from bisect import bisect_left, bisect_right
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from orchestrator.errors import PlanError
from orchestrator.plan.batch import BATCH_SCHEDULE, GLOBAL_BATCH, BatchSchedule

ROUNDS = 8
INITIAL_STATE = "train.initial_state"
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

    @property
    def digest(self) -> str:
        """Return a digest of the lengths."""
        return hashlib.sha256(repr(self.lengths).encode()).hexdigest()[:12]

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
class Branch:
    """A checkpoint of another run, where a run's state and its place in the data begin.

    Attributes:
        run: folder of the other run.
        updates: that it had done there.
        epoch, position: the place of its next sample.
        global_batch: of its updates in that epoch.
        seed, dataset_samples: of its order.
        shards_digest, lanes: of its data's shards, where it read some.
    """

    run: str
    updates: int
    epoch: int
    position: int
    global_batch: int
    seed: int
    dataset_samples: int
    shards_digest: str | None = None
    lanes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the known attributes by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class Stage(NamedTuple):
    """Updates with one global batch, from `update` on.

    Attributes:
        update: the first of them.
        batch: samples of a full update.
        epoch, position: the place of its first sample.
        samples: of all updates before, since update 0.
    """

    update: int
    batch: int
    epoch: int
    position: int
    samples: int


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
        batch_schedule: other values of G, from given updates on. An epoch continues with the next
            G; under `drop` it ends where fewer samples remain than the next update needs.
        branch: update 0 takes the samples after it. Its epoch keeps its number, and what remains of
            it counts as the first epoch of this order.

    Raises:
        PlanError: a data set without samples, `drop` with G > N, shards of another number of
            samples, or shards with a G that changes within an epoch; a branch from another data
            set.
    """

    dataset_samples: int
    global_batch: int
    ragged: str = "update"
    seed: int = 0
    shards: Shards | None = None
    batch_schedule: BatchSchedule = ()
    branch: Branch | None = None
    _stages: tuple[Stage, ...] = field(init=False, repr=False, compare=False)

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
        self._refuse_dropping_all(self.global_batch, GLOBAL_BATCH)
        if self.branch:
            self._refuse_branch(self.branch)
        place = (self.branch.epoch, self.branch.position) if self.branch else (0, 0)
        object.__setattr__(self, "_stages", (self._stage_at(0, self.global_batch, *place, 0),))
        for update, batch in self.batch_schedule:
            self._refuse_dropping_all(batch, f"{BATCH_SCHEDULE} from update {update} on: G")
            if self.shards:
                self._refuse_within_epoch(update)
            place, samples = self.place(update), self.samples_before(update)
            stages = (*self._stages, self._stage_at(update, batch, *place, samples))
            object.__setattr__(self, "_stages", stages)

    def _refuse_dropping_all(self, batch: int, key: str) -> None:
        if self.ragged == "drop" and batch > self.dataset_samples:
            raise PlanError(
                f"accumulation.ragged=drop with {key}={batch} leaves nothing "
                f"of a data set of {self.dataset_samples} samples. Set {key}="
                f"{self.dataset_samples} or less, or accumulation.ragged=update or carry"
            )

    def _refuse_within_epoch(self, update: int) -> None:
        """Refuse another G within an epoch: the lanes in which shards are read follow from it."""
        epoch = self.epoch_of(update)
        if self.epoch_of(update - 1) != epoch:
            return
        ends = [self.updates_before_epoch(epoch + number) for number in (0, 1)]
        nearest = min(
            (end for end in ends if end > self._stages[-1].update),
            key=lambda end: abs(end - update),
        )
        raise PlanError(
            f"{BATCH_SCHEDULE} changes the batch at update {update}, within epoch {epoch}; of data "
            f"that is read in shards it can change at the end of an epoch only. The nearest update "
            f"that works is {nearest}"
        )

    def _refuse_branch(self, branch: Branch) -> None:
        where = f"{branch.run} after update {branch.updates}"
        setting = shlex.quote(f"train.initial_weights={branch.run}")
        if branch.dataset_samples != self.dataset_samples:
            raise PlanError(
                f"{INITIAL_STATE}: {where} had a place in a data set of {branch.dataset_samples} "
                f"samples, but this one has {self.dataset_samples}; to begin with the weights "
                f"alone, use {setting}"
            )
        if self.shards and branch.shards_digest not in (None, self.shards.digest):
            raise PlanError(
                f"{INITIAL_STATE}: {where} had a place in shards of other lengths, so samples "
                "would come in another order; to begin with the weights alone, use "
                f"{setting}"
            )
        if self.shards and branch.position and branch.lanes not in (None, self.shards.lanes):
            raise PlanError(
                f"{INITIAL_STATE}: {where} is within an epoch of data that is read in "
                f"{branch.lanes} lanes, but these are {self.shards.lanes}; use as many, or a "
                "checkpoint at the end of an epoch"
            )
        if self.shards and branch.position and branch.global_batch != self.global_batch:
            raise PlanError(
                f"{INITIAL_STATE}: {where} is within an epoch of data that is read in shards, "
                f"where the batch cannot change; use {GLOBAL_BATCH}={branch.global_batch} (and "
                f"{BATCH_SCHEDULE} from the epoch's end on), or a checkpoint at the end of an epoch"
            )

    def _stage_at(self, update: int, batch: int, epoch: int, position: int, samples: int) -> Stage:
        if not self._updates_in(self.dataset_samples - position, batch):
            epoch, position = epoch + 1, 0
        return Stage(update, batch, epoch, position, samples)

    def _updates_in(self, samples: int, batch: int) -> int:
        """Return the updates that so many samples up to the end of an epoch make."""
        return samples // batch if self.ragged == "drop" else -(-samples // batch)

    def _stage_of(self, update: int) -> Stage:
        stages = self._stages
        return stages[bisect_right(stages, update, key=attrgetter("update")) - 1]

    @property
    def updates_per_epoch(self) -> int:
        """Return the first epoch's updates; others may differ with `carry`, a batch schedule or a
        branch.
        """
        return self.updates_before_epoch(self._stages[0].epoch + 1)

    def updates_before_epoch(self, epoch: int) -> int:
        """Return the first update whose first sample lies in this epoch, from 0, or after it."""
        samples, stages = self.dataset_samples, self._stages
        number = bisect_left(stages, epoch, key=attrgetter("epoch"))
        if not number:
            return 0
        stage = stages[number - 1]
        epochs, remaining = epoch - stage.epoch - 1, samples - stage.position
        if self.ragged == "carry":
            return stage.update + self._updates_in(remaining + epochs * samples, stage.batch)
        updates = self._updates_in(remaining, stage.batch)
        updates += epochs * self._updates_in(samples, stage.batch)
        first = stage.update + updates
        # A larger batch leaves out a rest of the epoch that smaller updates would use.
        return min(first, stages[number].update) if number < len(stages) else first

    def updates_for(self, epochs: float) -> int:
        """Return the updates that `epochs` epochs take, rounded up to a whole number.

        With `carry` the last one is filled up from the epoch after, so that no sample is missed.

        >>> ragged = ("update", "drop", "carry")
        >>> [DataOrder(dataset_samples=10, global_batch=4, ragged=r).updates_for(2) for r in ragged]
        [6, 4, 5]
        """
        exact = Fraction(str(epochs))  # as written: 0.7 epochs of 10 updates are 7, not 8
        begin, size = self._stages[0], self.dataset_samples
        if self.ragged == "carry":
            samples = exact * size - begin.position
            return self.updates_for_samples(samples if exact >= 1 else exact * self._first_samples)
        whole, part = divmod(exact, 1)
        whole += begin.epoch
        first, end = (self.updates_before_epoch(whole + number) for number in (0, 1))
        return first + math.ceil(part * (end - first))

    def updates_for_samples(self, samples: int | Fraction) -> int:
        """Return the least number of updates that have so many samples, more than 0, in all.

        >>> ragged = ("update", "drop", "carry")
        >>> orders = [DataOrder(dataset_samples=10, global_batch=4, ragged=r) for r in ragged]
        >>> [order.updates_for_samples(12) for order in orders]
        [4, 3, 3]
        """
        stage = self._stages[bisect_left(self._stages, samples, key=attrgetter("samples")) - 1]
        missing = math.ceil(samples - stage.samples)
        first = self.dataset_samples - stage.position  # samples of the stage's first epoch
        if self.ragged != "update" or missing <= first:
            return stage.update - (-missing // stage.batch)
        epochs, missing = divmod(missing - first, self.dataset_samples)
        updates = self._updates_in(first, stage.batch)
        updates += epochs * self._updates_in(self.dataset_samples, stage.batch)
        return stage.update + updates + self._updates_in(missing, stage.batch)

    def epochs_of(self, updates: int) -> float:
        """Return how many epochs so many updates make; of the last one the share of its updates."""
        begin, samples = self._stages[0], self.samples_before(updates)
        if self.ragged == "carry" and samples < self._first_samples:
            return samples / self._first_samples
        if self.ragged == "carry":
            return (samples + begin.position) / self.dataset_samples
        epoch = self.epoch_of(updates)
        first, end = (self.updates_before_epoch(epoch + number) for number in (0, 1))
        return float(epoch - begin.epoch + Fraction(updates - first, end - first))

    @property
    def _first_samples(self) -> int:
        """Return the samples of the first epoch, of which a branch leaves the rest."""
        return self.dataset_samples - self._stages[0].position

    def batch_of(self, update: int) -> int:
        """Return the global batch of the update's stage: its samples, unless it is ragged."""
        return self._stage_of(update).batch

    def epoch_of(self, update: int) -> int:
        """Return the epoch, from 0, that contains the update's first sample.

        A branch's epochs continue those of the run that it is from.
        """
        return self.place(update)[0]

    def samples_of(self, update: int) -> int:
        """Return how many samples the update has, without computing which."""
        batch = self.batch_of(update)
        if self.ragged == "carry":
            return batch
        return min(batch, self.dataset_samples - self.place(update)[1])

    def samples_before(self, update: int) -> int:
        """Return how many samples all updates before this one have."""
        stage = self._stage_of(update)
        if self.ragged != "update":  # each update is full
            return stage.samples + (update - stage.update) * stage.batch
        epoch, position = self.place(update)  # no sample is left out
        epochs = (epoch - stage.epoch) * self.dataset_samples
        return stage.samples + epochs + position - stage.position

    def indices(self, update: int, start: int = 0, count: int | None = None) -> NDArray[np.int64]:
        """Return the dataset's samples in the update's order: int64, (samples,), read-only.

        Args:
            start: position in the update of the first one to return.
            count: how many to return, at least one; None: all from `start` on. Only their blocks
                are computed.
        """
        import numpy as np  # late, so that `plan` stays fast

        epoch, position = self.place(update)
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

    def place(self, update: int) -> tuple[int, int]:
        """Return the epoch of the update's first sample, and its position in that epoch's order."""
        stage, samples = self._stage_of(update), self.dataset_samples
        number, position = update - stage.update, stage.position
        if self.ragged == "carry":
            epochs, position = divmod(position + number * stage.batch, samples)
            return stage.epoch + epochs, position
        number -= (first := self._updates_in(samples - position, stage.batch))
        if number < 0:
            return stage.epoch, position + (first + number) * stage.batch
        epochs, window = divmod(number, self._updates_in(samples, stage.batch))
        return stage.epoch + 1 + epochs, window * stage.batch


@lru_cache(maxsize=2)
def _block(order: DataOrder, epoch: int, number: int) -> NDArray[np.int64]:
    """Return the samples at `BLOCK` positions of an epoch from `number * BLOCK` on, read-only."""
    import numpy as np  # late, so that `plan` stays fast

    first, samples = number * BLOCK, order.dataset_samples
    positions = np.arange(first, min(first + BLOCK, samples))
    if order.shards:
        batch = order.batch_of(order.updates_before_epoch(epoch))
        block = order.shards.samples_at(positions, batch, order.seed, epoch)
    else:
        block = permuted(positions.astype(np.uint64), samples, order.seed, epoch).astype(np.int64)
    block.flags.writeable = False
    return block


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

    indices = encrypt(positions)
    while (outside := indices >= samples).any():
        indices[outside] = encrypt(indices[outside])
    return indices
