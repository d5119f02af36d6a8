"""The order of the data: pure, complete, and the same on every version of numpy."""

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config.schema import BOUNDS
from orchestrator.errors import PlanError
from orchestrator.plan.order import BLOCK, DataOrder, _block, permuted
from tests.refusals import refused

sizes = st.integers(1, 200)
seeds = st.integers(0, 2**63 - 1)
raggeds = st.sampled_from(BOUNDS["accumulation.ragged"].choice)


def order_of(size, batch, ragged="update", seed=0) -> DataOrder:
    return DataOrder(dataset_samples=size, global_batch=batch, ragged=ragged, seed=seed)


def philox4x64(counter: int, key: tuple[int, int]) -> list[int]:
    """Four 64-bit outputs of Philox4x64-10, written from the paper's definition."""
    mask = 2**64 - 1
    c0, c1, c2, c3 = (counter >> shift & mask for shift in (0, 64, 128, 192))
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (p1 >> 64) ^ c1 ^ k0, p1 & mask, (p0 >> 64) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return [c0, c1, c2, c3]


def test_the_generator_is_the_paper_s():
    # Known answer published with Random123 (kat_vectors): zero counter and key.
    assert philox4x64(0, (0, 0)) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]


def epoch_order(size: int, seed: int, epoch: int) -> list[int]:
    return permuted(np.arange(size, dtype=np.uint64), size, seed, epoch).tolist()


@given(st.integers(1, 40), seeds, st.integers(0, 2**40))
def test_the_order_is_what_the_documentation_says(size, seed, epoch):
    mask64 = 2**64 - 1
    keys = philox4x64(1, (seed, epoch)) + philox4x64(2, (seed, epoch))
    half = 1
    while 4**half < size:
        half += 1

    def encrypted(number):
        left, right = number >> half, number % 2**half
        for key in keys:
            x = (right + key) & mask64
            x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask64
            x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask64
            left, right = right, left ^ (x ^ x >> 31) % 2**half
        return left << half | right

    expected = []
    for position in range(size):
        number = encrypted(position)
        while number >= size:
            number = encrypted(number)
        expected.append(number)
    assert epoch_order(size, seed, epoch) == expected


def test_a_data_set_of_nine_billion_samples_costs_the_memory_of_one_block():
    order = order_of(9_000_000_000, 2 * BLOCK + 5)
    tracemalloc.start()
    windows = [order.indices(update) for update in (0, 1, order.updates_per_epoch - 1)]
    assert tracemalloc.get_traced_memory()[1] < 16 * 8 * BLOCK
    tracemalloc.stop()
    drawn = np.concatenate(windows)
    assert len(set(drawn.tolist())) == len(drawn)
    assert 0 <= drawn.min() < drawn.max() < 9_000_000_000


@given(sizes, sizes, seeds)
def test_every_epoch_visits_every_sample_once_in_update_mode(size, batch, seed):
    order = order_of(size, batch, "update", seed)
    for epoch in range(3):
        updates = range(epoch * order.updates_per_epoch, (epoch + 1) * order.updates_per_epoch)
        assert all(order.epoch_of(update) == epoch for update in updates)
        assert all(1 <= order.samples_of(update) <= min(batch, size) for update in updates)
        drawn = np.concatenate([order.indices(update) for update in updates])
        assert sorted(drawn.tolist()) == list(range(size))


@given(sizes, st.integers(1, 500), seeds)
def test_every_epoch_visits_every_sample_once_in_carry_mode(size, batch, seed):
    order = order_of(size, batch, "carry", seed)
    updates = order.updates_for(3)
    stream = np.concatenate([order.indices(update) for update in range(updates)])
    assert len(stream) == updates * batch
    assert 3 * size <= len(stream) < 3 * size + batch
    for epoch in range(3):
        assert sorted(stream[epoch * size : (epoch + 1) * size].tolist()) == list(range(size))


@given(sizes, sizes, seeds)
def test_drop_keeps_full_windows_of_different_samples(size, batch, seed):
    batch = min(size, batch)
    order = order_of(size, batch, "drop", seed)
    assert order.updates_per_epoch == size // batch
    for epoch in range(2):
        first = epoch * order.updates_per_epoch
        seen = [order.indices(first + u) for u in range(order.updates_per_epoch)]
        assert {len(window) for window in seen} == {batch}
        assert max(Counter(np.concatenate(seen).tolist()).values()) == 1


@given(sizes, sizes, raggeds, seeds, st.lists(st.integers(0, 60), min_size=1, max_size=6))
def test_a_window_is_a_pure_function_of_seed_and_update(size, batch, ragged, seed, updates):
    order = order_of(size, min(size, batch), ragged, seed)
    first = {update: order.indices(update).tolist() for update in updates}
    for update in reversed(updates):
        _block.cache_clear()
        again = order_of(size, min(size, batch), ragged, seed).indices(update)
        assert again.tolist() == first[update]
        assert again.dtype == np.int64
        assert len(again) == order.samples_of(update)
        assert not again.flags.writeable


@given(sizes, sizes, raggeds, st.integers(1, 5))
def test_the_updates_of_some_epochs_end_where_the_next_epoch_begins(size, batch, ragged, epochs):
    order = order_of(size, min(size, batch), ragged)
    updates = order.updates_for(epochs)
    assert order.epoch_of(updates) >= epochs
    assert order.epoch_of(updates - 1) == epochs - 1
    assert order.updates_for(1) == order.updates_per_epoch


def test_a_global_batch_above_the_data_set_is_one_update_an_epoch_or_spans_epochs():
    small = order_of(10, 25, "update")
    assert (small.updates_per_epoch, small.samples_of(0), small.updates_for(3)) == (1, 10, 3)
    carried = order_of(10, 25, "carry")
    assert [carried.epoch_of(update) for update in range(4)] == [0, 2, 5, 7]
    assert Counter(Counter(carried.indices(0).tolist()).values()) == {2: 5, 3: 5}


def test_part_of_an_epoch_is_counted_as_written():
    assert order_of(10, 1).updates_for(0.7) == 7  # 0.7 * 10 is 7.000000000000001
    assert order_of(10, 4, "update").updates_for(0.5) == 2
    assert order_of(10, 4, "carry").updates_for(1.5) == 4


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"dataset_samples": 0}, "0 samples 1"),
        (
            {"ragged": "drop", "global_batch": 11},
            "accumulation.ragged=drop accumulation.global_batch=11 accumulation.global_batch=10",
        ),
    ],
)
def test_an_order_that_cannot_be_is_refused(values, names):
    with refused(PlanError, names):
        DataOrder(**{"dataset_samples": 10, "global_batch": 4} | values)
