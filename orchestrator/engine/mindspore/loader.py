"""Batches from a job's data set: one for each micro-batch, in order, fetched ahead by threads.

Samples are numpy arrays or numbers (or tuples, or dictionaries of them); they are stacked and
become MindSpore tensors. The data set may be MindSpore's own pipeline, read into something
indexable.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from mindspore import Tensor, ops

from orchestrator.engine.api import MicroBatch
from orchestrator.engine.common.micro_steps import derived_seed
from orchestrator.errors import JobError
from orchestrator.job import Job

AHEAD_PER_WORKER = 2


def stack(samples: Sequence[Any], floats: Any = None) -> Any:
    """Stack samples along a new axis 0, the structure kept.

    Args:
        samples: equally built: numbers, arrays, tensors, or tuples or dictionaries of them.
        floats: numpy type of floating-point numbers; None leaves float64 to become float32.
    """
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: stack([sample[key] for sample in samples], floats) for key in first}
    if isinstance(first, tuple | list):
        return tuple(stack(column, floats) for column in zip(*samples, strict=True))
    if isinstance(first, Tensor):
        return ops.stack(list(samples))
    array = np.stack([np.asarray(sample) for sample in samples])
    if array.dtype.kind == "f":
        wanted = floats or (np.float32 if array.dtype == np.float64 else array.dtype)
        array = array.astype(wanted, copy=False)
    return Tensor(array)


class Loader:
    """Fetcher and collator of micro-batches.

    Args:
        floats: see `stack`.
        workers: threads that fetch ahead; 0 fetches when asked.
    """

    def __init__(self, job: Job, seed: int, workers: int, floats: Any) -> None:
        self._dataset = job.dataset()
        self._collate: Callable[[list[Any]], Any] = getattr(job, "collate", lambda _: None)
        self._augments = bool(getattr(job, "augments", False))
        self._seed, self._workers, self._floats = seed, workers, floats
        if workers and self._augments:
            raise JobError(
                f"{type(job).__name__} augments, and MindSpore's loader workers are threads, which "
                f"share one random state; set train.loader_workers=0"
            )

    def _fetch(self, micro_batch: MicroBatch) -> Any:
        samples: list[Any] = []
        for place, index in enumerate(micro_batch.indices):
            if self._augments:
                seed = derived_seed(
                    "data", self._seed, micro_batch.update, micro_batch.start + place
                )
                random.seed(seed)
                np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
            samples.append(self._dataset[index])
        collated = self._collate(samples)
        return stack(samples, self._floats) if collated is None else collated

    def batches(self, micro_batches: Iterable[MicroBatch]) -> Iterator[Any]:
        """See `Engine.batches`."""
        if not self._workers:
            yield from map(self._fetch, micro_batches)
            return
        with ThreadPoolExecutor(self._workers, thread_name_prefix="loader") as pool:
            waiting: deque[Future[Any]] = deque()
            for micro_batch in micro_batches:
                waiting.append(pool.submit(self._fetch, micro_batch))
                if len(waiting) > self._workers * AHEAD_PER_WORKER:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
