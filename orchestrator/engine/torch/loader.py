"""Batches of the micro-batches that the plan names, in order, fetched ahead by worker processes.

What `dataset[i]` draws at random depends on the seed and the sample's place in the update, never on
which process fetches it. Workers of jobs are spawned, not forked: a forked one would inherit the
sockets of the group, and peers would not notice when its rank is killed.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from orchestrator.engine.api import MicroBatch
from orchestrator.engine.common.seeds import derived_seed
from orchestrator.engine.torch.model import seed_everything
from orchestrator.errors import JobError
from orchestrator.job import Job


@dataclass(frozen=True, slots=True)
class _Samples(Dataset[Any]):
    """The user's data set as DataLoader wants it, indexed by whole micro-batches."""

    dataset: Any
    seed: int
    augments: bool

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, micro_batch: MicroBatch) -> list[Any]:
        """Return the samples of one micro-batch. DataLoader calls this name with what its sampler
        gave.
        """
        update, start = micro_batch.update, micro_batch.start
        if self.augments:
            samples: list[Any] = []
            for position, index in zip(micro_batch.positions, micro_batch.indices, strict=True):
                seed_everything(derived_seed("sample", self.seed, update, position))
                samples.append(self.dataset[index])
            return samples
        seed_everything(derived_seed("data", self.seed, update, start))
        many = getattr(self.dataset, "__getitems__", None)
        if many is not None:
            return many(list(micro_batch.indices))
        return [self.dataset[index] for index in micro_batch.indices]


@dataclass(frozen=True, slots=True)
class _Rows(Dataset[Any]):
    """Batches of tensors whose rows are samples: one index each, in the place of a call for each
    sample. Nothing is drawn, so nothing is seeded.
    """

    tensors: Sequence[Tensor]

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitems__(self, micro_batch: MicroBatch) -> list[Tensor]:
        """Return what `default_collate` makes of the samples of one micro-batch."""
        rows = torch.tensor(micro_batch.indices)
        return [tensor[rows] for tensor in self.tensors]


def _rows_of(dataset: Any) -> Sequence[Tensor] | None:
    """Return the tensors of a data set that is exactly torch's TensorDataset, in the host's memory.

    A subclass may do more with a sample.
    """
    if type(dataset) is not TensorDataset:
        return None
    plain = all(
        type(tensor) is Tensor and tensor.is_cpu and tensor.layout is torch.strided
        for tensor in dataset.tensors
    )
    return dataset.tensors if plain else None


def _as_it_is(batch: Any) -> Any:
    return batch


def _collate(own: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    batch = own(samples)
    return default_collate(samples) if batch is None else batch


def collate_of(job: Any) -> Callable[[list[Any]], Any]:
    """Return the function that makes a batch of a list of samples, as `job` wants it: its own, or
    torch's where that returns None.
    """
    # A default that always gives None need not travel to workers, and the job with it.
    if not hasattr(job, "collate") or getattr(type(job), "collate", None) is Job.collate:
        return default_collate
    return partial(_collate, job.collate)


def batches(
    micro_batches: Iterable[MicroBatch],
    *,
    dataset: Any,
    job: Any,
    seed: int,
    workers: int = 0,
    pin_memory: bool = False,
    context: str | None = "spawn",
) -> Generator[Any]:
    """Return one batch for each micro-batch, in order.

    Args:
        micro_batches: read lazily, a little ahead of the batches when there are workers.
        dataset: anything with `len()` and `[index]`; `__getitems__(indices)` is used where it has
            one.
        job: its `collate` and `augments` are honoured.
        workers: processes that fetch ahead; 0 fetches in this process.
        pin_memory: put batches in page-locked memory, for a GPU.
        context: how workers are started; None: torch's own way.

    Raises:
        JobError: the data set cannot be indexed, or cannot be sent to workers.
    """
    lacking = [n for n in ("__len__", "__getitem__") if not hasattr(type(dataset), n)]
    if lacking or isinstance(dataset, IterableDataset):
        raise JobError(
            f"dataset() must give something with len() and [index], but gives a "
            f"{type(dataset).__name__} without {' and '.join(lacking) or 'either'}"
        )
    collate = collate_of(job)
    samples: _Samples | _Rows = _Samples(dataset, seed, bool(getattr(job, "augments", False)))
    if collate is default_collate and (tensors := _rows_of(dataset)) is not None:
        samples, collate = _Rows(tensors), _as_it_is
    if not (workers or pin_memory):  # a DataLoader's own work in between would take longer
        for micro_batch in micro_batches:
            yield collate(samples.__getitems__(micro_batch))
        return
    loader: DataLoader[Any] = DataLoader(
        samples,
        batch_sampler=micro_batches,  # type: ignore[arg-type]  # an index of any kind serves
        collate_fn=collate,
        num_workers=workers,
        worker_init_fn=partial(_begin_worker, os.getpid()) if workers else None,
        multiprocessing_context=context if workers else None,
        pin_memory=pin_memory,
    )
    try:
        with warnings.catch_warnings():  # the error says better what DataLoader guesses
            warnings.filterwarnings("ignore", "Got pickle error", UserWarning)
            source = iter(loader)
    except (AttributeError, TypeError, OSError) as error:
        if workers == 0:
            raise
        raise JobError(
            f"the data set or collate() cannot be sent to loader workers: {error}; define both at "
            "the top of a module, or use train.loader_workers=0"
        ) from error
    try:
        yield from source
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        # The pipe to a worker that just ended broke before torch's handler heard of its end.
        if (dead := _dead_worker_error(source)) is not None:
            raise dead from error
        raise
    finally:
        # torch's handler of SIGCHLD raises for a worker that ended badly again and again, wherever
        # the signal finds us, until its loader is shut down; a traceback would keep that alive.
        if workers:
            source._shutdown_workers()  # type: ignore[attr-defined]  # noqa: SLF001


def _dead_worker_error(source: Any) -> RuntimeError | None:
    """Return torch's error for a worker that ended; None if all of them live."""
    until = time.monotonic() + 2.0  # time for the end of one that seems to have ended
    for worker in getattr(source, "_workers", ()):
        worker.join(timeout=max(0.0, until - time.monotonic()))
        if code := worker.exitcode:
            how = f"exited unexpectedly with exit code {code}. "
            if code < 0:
                how = f"is killed by signal: {signal.strsignal(-code)}. "
            return RuntimeError(f"DataLoader worker (pid {worker.pid}) {how}")
    return None


def _begin_worker(rank: int, _: int) -> None:
    """Make a loader worker die with its rank, and leave signals to the rank.

    A stop signal reaches the whole process group; a worker that died of it would look like a
    failure while its rank is finishing the window.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGQUIT)  # its rank asks, see `agent/stacks.py`
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
        if os.getppid() != rank:  # it died before
            os._exit(1)
