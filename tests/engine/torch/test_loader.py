"""Batches come in the plan's order, and their random numbers from their place alone."""

import itertools
import multiprocessing
import os
import random
import re
import signal
from functools import partial

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import TensorDataset, get_worker_info

from orchestrator import Job
from orchestrator.engine.api import MicroBatch
from orchestrator.engine.torch import loader
from orchestrator.errors import JobError
from orchestrator.trainer.failure import describe
from tests.engine.torch.jobs import Samples
from tests.helpers import alive, until
from tests.refusals import refused

pytestmark = pytest.mark.long

WORK = [
    MicroBatch(update=0, positions=range(2), indices=(4, 1)),
    MicroBatch(update=0, positions=range(2, 3), indices=(3,)),
    MicroBatch(update=1, positions=range(3), indices=(0, 2, 5)),
]


class Augmenting(Job):
    """Samples that draw random numbers."""

    augments = True


class Listing(Job):
    def collate(self, samples):
        return sorted(samples)


def noisy(index):
    return index, random.random(), np.random.random(), torch.rand(()).item()


def telling(index):
    return os.getpid()


class Many(Samples):
    """Fetches several samples at once, and never one."""

    def __getitems__(self, indices):
        return [self.of(index) for index in indices]

    __getitem__ = None


def _batches(dataset, job=None, workers=0, work=WORK, seed=0):
    made = loader.batches(work, dataset=dataset, job=job or Job(), seed=seed, workers=workers)
    return list(made)


def test_the_jobs_own_collate_and_the_data_sets_getitems_are_used():
    assert _batches(list(range(6)), Listing()) == [[1, 4], [3], [0, 2, 5]]
    assert [b.tolist() for b in _batches(Many(lambda index: 10 * index))] == [
        [40, 10],
        [30],
        [0, 20, 50],
    ]


@pytest.mark.parametrize("job", [Job, Augmenting])
def test_batches_are_the_plans_in_order_and_their_random_numbers_those_of_any_process(job):
    here, there = (_batches(Samples(noisy), job(), workers) for workers in (0, 1))
    assert [batch[0].tolist() for batch in here] == [list(m.indices) for m in WORK]
    assert [torch.stack(b).tolist() for b in here] == [torch.stack(b).tolist() for b in there]


def test_an_augmented_sample_depends_on_its_place_and_not_on_how_the_update_is_cut():
    whole = [MicroBatch(update=3, positions=range(3), indices=(5, 4, 3))]
    cut = [
        MicroBatch(update=3, positions=range(1), indices=(5,)),
        MicroBatch(update=3, positions=range(1, 3), indices=(4, 3)),
    ]

    def numbers(work, **more):
        batches = _batches(Samples(noisy), Augmenting(), work=work, **more)
        return torch.cat([torch.stack(batch) for batch in batches], dim=1).tolist()

    assert numbers(whole) == numbers(cut)
    assert numbers(whole) != numbers(whole, seed=1)
    other = [MicroBatch(update=4, positions=range(3), indices=(5, 4, 3))]
    assert numbers(whole)[1:] != numbers(other)[1:]


def _fetch_until_killed(connection):
    endless = (
        MicroBatch(update=update, positions=range(1), indices=(0,)) for update in itertools.count()
    )
    made = loader.batches(endless, dataset=Samples(telling), job=Job(), seed=0, workers=1)
    connection.send(int(next(made)[0]))
    signal.pause()


def test_a_worker_ends_with_its_rank_and_leaves_its_signals_to_it():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    rank = context.Process(target=_fetch_until_killed, args=(theirs,))
    rank.start()
    assert ours.poll(90)
    worker = psutil.Process(ours.recv())
    worker.send_signal(signal.SIGTERM)  # as a scheduler sends it to all processes of a job
    worker.send_signal(signal.SIGINT)
    assert worker.is_running()
    rank.kill()
    rank.join()
    until(lambda: not alive(worker.pid), what="the worker's end")


@pytest.mark.parametrize("dataset", [iter([1, 2]), None])
def test_a_data_set_without_length_or_index_is_refused(dataset):
    with refused(JobError, "len() [index]"):
        _batches(dataset)


def test_a_data_set_that_cannot_be_sent_to_workers_is_refused():
    with refused(JobError, "train.loader_workers=0"):
        _batches(Samples(lambda index: index), workers=1)


def doomed(how, index):
    """End the worker that reads the fourth sample."""
    if index == 3 and get_worker_info() is not None:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), how)
    return torch.zeros(1)


def test_a_worker_that_crashed_is_named_with_its_signal():
    said = describe(RuntimeError("DataLoader worker (pid 7) is killed by signal: Aborted. "))
    assert "(process 7) was killed by SIGABRT; what it said last is in this rank's log" in said


# What a killed process had open with this one (torch's shared memory) is closed by the collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("how", "message"),
    [
        (signal.SIGKILL, r"was killed by SIGKILL, mostly by the kernel, for want of memory"),
        ("exit", r"exited unexpectedly with exit code 3"),
    ],
)
def test_a_loader_worker_that_ends_is_named_with_how(how, message):
    work = [MicroBatch(update=0, positions=range(n, n + 1), indices=(n,)) for n in range(4)]
    dataset, said = Samples(partial(doomed, how)), []
    while len(said) < 4:  # on a starved machine torch may find it gone before it hears how it went
        with pytest.raises(RuntimeError) as error:
            _batches(dataset, workers=1, work=work)
        said.append(describe(error.value))
        if re.search(rf"a loader worker of this rank \(process \d+\) {message}", said[-1]):
            return
        assert "exited unexpectedly; the log has what it said last" in said[-1]
    raise AssertionError("\n".join(said))


class _Journal(TensorDataset):
    """A subclass, which may do more with a sample."""

    def __getitem__(self, index):
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_rows_of_tensors_are_the_batches_that_samples_make_one_by_one(workers):
    tensors = (torch.randn(7, 3), torch.arange(7), torch.randn(3, 7).t(), torch.randn(7) > 0)
    micro_batches = [
        MicroBatch(update=0, positions=range(2), indices=(6, 0)),
        MicroBatch(update=0, positions=range(2, 5), indices=(3, 3, 1)),
    ]

    def read(dataset):
        return list(
            loader.batches(micro_batches, dataset=dataset, job=None, seed=1, workers=workers)
        )

    for found, wanted in zip(read(TensorDataset(*tensors)), read(_Journal(*tensors)), strict=True):
        assert type(found) is type(wanted) is list
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)
            assert (one.dtype, one.is_contiguous()) == (other.dtype, other.is_contiguous())
