"""A data set of shards that are read as streams: files, archives, objects in a store."""

from __future__ import annotations

import os
import random
import sys
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from orchestrator.errors import DataError
from orchestrator.plan.order import Shards

NEAR = 256
"""Samples that a stream skips before the shard is opened once more instead."""


class ShardedDataset:
    """Samples in shards of known lengths, each read from its first sample to its last.

    A job's `dataset()` may return one; `run.windows(len(data), shards=data.shards)` takes its
    shards. The order of an epoch is then along the shards (`Shards`), a function of the seed alone,
    and a run that resumes opens each shard where it stopped.

    Args:
        lengths: samples of each shard.
        read: opens a shard: given its number and a sample's number in it, yields the samples from
            that one on. To begin in its middle costs the skipped samples alone.
        lanes: shards that are read at the same time, over all ranks: at least as many as ranks, so
            that each rank reads shards of its own.

    Raises:
        PlanError: lengths that are negative, or no sample at all.
    """

    def __init__(
        self, lengths: Sequence[int], read: Callable[[int, int], Iterator[Any]], lanes: int = 16
    ) -> None:
        self.shards = Shards(tuple(map(int, lengths)), lanes)
        self._read = read
        self._ends = list(accumulate(self.shards.lengths))
        # by (shard, number of its next sample); the one that was used last comes last
        self._streams: OrderedDict[tuple[int, int], Iterator[Any]] = OrderedDict()
        self._pid, self._of_parent = os.getpid(), self._streams

    def __getstate__(self) -> dict[str, Any]:
        streams = OrderedDict[tuple[int, int], Iterator[Any]]()  # open ones are of this process
        return {**self.__dict__, "_streams": streams, "_of_parent": streams}

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        """Return a sample; the next one of an open stream costs one step.

        Raises:
            DataError: a shard has fewer samples than was said.
            IndexError: there is no such sample.
        """
        if self._pid != os.getpid():  # a fork, whose files have their positions with its parent
            self._pid, self._of_parent, self._streams = os.getpid(), self._streams, OrderedDict()
        index = range(len(self))[index]
        shard = bisect_right(self._ends, index)
        length = self.shards.lengths[shard]
        wanted = index - (self._ends[shard] - length)
        behind = [at for s, at in self._streams if s == shard and wanted - NEAR <= at <= wanted]
        at = max(behind, default=wanted)
        stream = self._streams.pop((shard, at), None) or iter(self._read(shard, wanted))
        try:
            if at < wanted:
                with kept_generators():  # samples of others may draw, too
                    for _ in range(wanted - at):
                        next(stream)
            sample = next(stream)
        except StopIteration:
            raise DataError(
                f"shard {shard} was to have {length} samples, but ended before sample {wanted}"
            ) from None
        if wanted + 1 < length:
            self._streams[shard, wanted + 1] = stream
        if len(self._streams) > 2 * self.shards.lanes:
            self._streams.popitem(last=False)
        return sample


# ------------------------------------------------------------------ Random numbers of samples


def generator_states() -> dict[str, Any]:
    """Return the states of Python's generator, and of NumPy's and torch's where they are loaded."""
    modules: dict[str, Any] = dict(sys.modules)
    states: dict[str, Any] = {"random": random.getstate()}
    if numpy := modules.get("numpy"):
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = name, keys.tobytes(), rest
    if torch := modules.get("torch"):
        states["torch"] = torch.default_generator.get_state().numpy().tobytes()
    return states


@contextmanager
def kept_generators() -> Generator[None]:
    """Give Python's, NumPy's and torch's global generators their states back."""
    modules: dict[str, Any] = dict(sys.modules)
    numpy, torch = modules.get("numpy"), modules.get("torch")
    python = random.getstate()
    numpys = numpy.random.get_state() if numpy else None
    torchs = torch.default_generator.get_state() if torch else None
    try:
        yield
    finally:
        random.setstate(python)
        if numpy:
            numpy.random.set_state(numpys)
        if torch:
            torch.default_generator.set_state(torchs)


# ------------------------------------------------------------------ Held-out data


class HeldOutData:
    """A job's held-out data sets, one after the other, as one data set of all their samples.

    Args:
        data_sets: anything with `len()` and `[index]`, by name; "" is the name of an only one.

    Attributes:
        names, lengths: of the data sets.
        sample_lengths: of all samples, in tokens; None if not known, or not needed.
    """

    def __init__(self, data_sets: Mapping[str, Any]) -> None:
        self.names = tuple(data_sets)
        self.lengths = tuple(map(len, data_sets.values()))
        self._parts = tuple(data_sets.values())
        self.sample_lengths: list[int] | None = None
        self._ends = list(accumulate(self.lengths))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return consecutive samples, all of which are in one data set."""
        number, first = self._place(indices[0])
        own = range(first, first + len(indices))
        many = getattr(self._parts[number], "__getitems__", None)
        return [self._parts[number][i] for i in own] if many is None else many(list(own))

    def _place(self, index: int) -> tuple[int, int]:
        """Return the number of a sample's data set, and the sample's number in there."""
        number = bisect_right(self._ends, index)
        return number, index - (self._ends[number] - self.lengths[number])

    def describe(self, start: int, count: int = 0) -> str:
        """Return the spelling of a data set's samples, for messages; of all of them by default.

        >>> HeldOutData({"": "abcd"}).describe(2, 2)
        'samples 2 to 3 of validation()'
        >>> HeldOutData({"a": "b", "c": "d"}).describe(1)
        "validation()['c']"
        """
        number, first = self._place(start)
        name = self.names[number]
        named = f"validation()[{name!r}]" if name else "validation()"
        return f"samples {first} to {first + count - 1} of {named}" if count else named

    def figures(self, number: int, loss: float, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the figures of data set `number` by their names in the record of the run."""
        prefix = f"{self.names[number]}." if self.names[number] else ""
        return {f"{prefix}{name}": value for name, value in {"loss": loss, **metrics}.items()}
