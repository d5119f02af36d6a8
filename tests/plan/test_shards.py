"""The order along shards: a permutation, the same for every number of ranks, in long stretches."""

import multiprocessing
import os
import pickle
import random
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import ShardedDataset, Shards
from orchestrator.errors import DataError, PlanError
from orchestrator.plan.order import DataOrder, permuted
from tests.refusals import refused

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any)


def _order(lengths, batch, lanes, **more):
    shards = Shards(tuple(lengths), lanes)
    return DataOrder(dataset_samples=sum(lengths), global_batch=batch, shards=shards, **more)


@given(LENGTHS, st.integers(1, 50), st.integers(1, 20), st.integers(0, 3))
def test_an_epoch_has_every_sample_once(lengths, batch, lanes, epoch):
    order = _order(lengths, batch, lanes, seed=5)
    per = order.updates_per_epoch
    found = np.concatenate([order.indices(epoch * per + update) for update in range(per)])
    assert sorted(found.tolist()) == list(range(sum(lengths)))


def test_four_lines_of_numpy_give_the_order():
    lengths, batch, seed = np.array([30, 20, 50, 28]), 32, 3
    order = permuted(np.arange(4, dtype=np.uint64), 4, seed, 0).astype(int)
    stream = np.concatenate([lengths[:s].sum() + np.arange(lengths[s]) for s in order])
    lanes = stream.reshape(2, 4, 16)  # lane, update, place in the lane's part of the update
    updates = lanes.transpose(1, 0, 2).reshape(4, 32)
    ours = _order(lengths.tolist(), batch, 2, seed=seed)
    assert [ours.indices(update).tolist() for update in range(4)] == updates.tolist()


@given(st.integers(1, 8))
def test_a_rank_opens_few_shards_and_reads_each_on(ranks):
    """With as many lanes as ranks, each opens its own shards and those at the ends of its lanes."""
    lengths, lanes = [64] * 32, 8
    opened = []

    def read(shard, start):
        opened.append((shard, start))
        return iter(range(shard * 64 + start, shard * 64 + 64))

    order = _order(lengths, 48, lanes)
    blocks = [slice(begin, begin + size) for begin, size in _blocks(48, ranks)]
    for block in blocks:
        opened.clear()
        data = ShardedDataset(lengths, read, lanes)
        for update in range(len(data) // 48):
            for index in order.indices(update)[block].tolist():
                assert data[index] == index
        own = -(-lanes // ranks) + 1
        assert len(opened) <= own * (32 // lanes + 1) + 1


def _blocks(samples, ranks):
    sizes = [samples // ranks + (rank < samples % ranks) for rank in range(ranks)]
    return [(sum(sizes[:rank]), size) for rank, size in enumerate(sizes)]


def test_a_shard_is_opened_where_a_resumed_run_stands():
    opened = []

    def read(shard, start):
        opened.append((shard, start))
        return iter(range(start, 100))

    data = ShardedDataset([100, 100], read)
    assert [data[150], data[151], data[153]] == [50, 51, 53]
    assert opened == [(1, 50)]
    assert data[-1] == data[199]
    with pytest.raises(IndexError):
        data[200]


def test_what_a_sample_draws_does_not_depend_on_which_were_skipped():
    def read(shard, start):
        return ((number, random.random(), np.random.rand()) for number in range(start, 100))

    found = []
    for before in ([], [6], [0, 3]):
        data = ShardedDataset([100], read)
        for index in before:
            assert data[index][0] == index
        random.seed(1)
        np.random.seed(1)
        found.append(data[7])
    assert found[0] == found[1] == found[2]


def _read_bytes(path, shard, start):
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while byte := file.read(1):
            yield byte[0]


def test_workers_of_a_loader_share_no_open_shard_with_the_process_that_made_them(tmp_path):
    (tmp_path / "shard").write_bytes(bytes(range(100)))
    data = ShardedDataset([100], partial(_read_bytes, tmp_path / "shard"))
    assert data[0] == 0
    assert pickle.loads(pickle.dumps(data))[5] == 5  # noqa: S301  # written above
    worker = multiprocessing.get_context("fork").Process(target=lambda: os._exit(data[7]))
    worker.start()
    worker.join()
    assert worker.exitcode == 7
    assert data[1] == 1


def test_shard_that_ends_early():
    data = ShardedDataset([3, 3], lambda shard, start: iter(range(start, 3 - shard)))
    assert [data[0], data[3]] == [0, 0]
    with refused(DataError, "1 3 2"):
        data[5]


@pytest.mark.parametrize(
    ("lengths", "lanes", "samples", "names"),
    [
        ((), 1, 0, "lengths 0"),
        ((0, 0), 1, 0, "lengths 0"),
        ((3, -1), 1, 2, "lengths 0"),
        ((3,), 0, 3, "lanes shards 1 0"),
        ((2, 3), 1, 6, "shards 5 samples 6"),
    ],
)
def test_shards_that_cannot_be_are_refused(lengths, lanes, samples, names):
    with refused(PlanError, names):
        DataOrder(dataset_samples=samples, global_batch=2, shards=Shards(lengths, lanes))


def test_a_token_corpus_takes_no_memory_for_its_order():
    order = DataOrder(
        dataset_samples=9_000_000_000, global_batch=512, shards=Shards((1_000_000,) * 9000, 64)
    )
    assert len(set(order.indices(10_000_000).tolist())) == 512


def test_lengths_are_hashed_once_however_often_an_order_is_used():
    hashes = []

    class Length(int):
        def __hash__(self):
            hashes.append(self)
            return super().__hash__()

    shards = Shards(tuple(map(Length, [7] * 100)), lanes=4)
    order = DataOrder(dataset_samples=700, global_batch=35, shards=shards)
    for update in range(20):
        order.indices(update)
    assert len(hashes) == 100
    assert hash(shards) == hash(Shards((7,) * 100, lanes=4))
