"""Laws of the split of samples over ranks, for any numbers."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import PlanError
from orchestrator.plan.batch import Batch
from orchestrator.plan.split import (
    Split,
    assign,
    assign_leaves,
    split_for,
    split_leaves,
    split_window,
)
from tests.refusals import refused

samples_ = st.integers(0, 3_000)
ranks_ = st.integers(1, 300)
few = st.integers(1, 40)


def assert_sound(split: Split, samples: int, ranks: int) -> None:
    assert split.ranks == ranks
    assert split.samples == sum(split.samples_per_rank) == samples
    covered = [piece for rank in range(ranks) for piece in split.pieces(rank)]
    assert all(count > 0 for _, count in covered)
    assert sum(count for _, count in covered) == samples
    assert all(start + count == following for (start, count), (following, _) in pairwise(covered))
    assert not covered or covered[0][0] == 0
    assert split.idle_ranks == tuple(r for r in range(ranks) if not split.micro_batches[r])
    assert split.micro_steps == max(len(split.pieces(rank)) for rank in range(ranks))


@given(samples_, ranks_, few)
def test_an_even_split_covers_the_update_once_in_nearly_equal_blocks(samples, ranks, steps):
    split = split_window(samples, ranks, steps=steps)
    assert_sound(split, samples, ranks)
    sizes = split.samples_per_rank
    assert sorted(sizes, reverse=True) == list(sizes)
    assert max(sizes) - min(sizes) <= 1
    for size, cuts in zip(sizes, split.micro_batches, strict=True):
        assert len(cuts) == min(steps, size)
        assert not cuts or max(cuts) - min(cuts) <= 1


@given(st.lists(st.integers(0, 60), min_size=1, max_size=40), few)
def test_any_table_of_blocks_is_cut_under_the_cap(sizes, cap):
    split = assign(sizes, cap=cap)
    assert_sound(split, sum(sizes), len(sizes))
    assert split.samples_per_rank == tuple(sizes)
    assert all(count <= cap for cuts in split.micro_batches for count in cuts)
    assert split.micro_steps == -(-max(sizes) // cap)


def leaves_of(split: Split) -> list[tuple[int, int]]:
    return [piece for rank in range(split.ranks) for piece in split.pieces(rank)]


@given(samples_, ranks_, ranks_, few)
def test_leaves_do_not_depend_on_the_ranks(samples, ranks, other_ranks, leaf_size):
    split = split_leaves(samples, ranks, leaf_size)
    assert_sound(split, samples, ranks)
    assert leaves_of(split) == leaves_of(split_leaves(samples, other_ranks, leaf_size))
    assert all(start % leaf_size == 0 for start, _ in leaves_of(split))
    counts = [len(cuts) for cuts in split.micro_batches]
    assert max(counts) - min(counts) <= 1
    assert sorted(counts, reverse=True) == counts


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), few, st.data())
def test_any_table_of_whole_leaves_keeps_the_leaves(counts, leaf_size, data):
    most = sum(counts) * leaf_size
    samples = data.draw(st.integers(max(0, most - leaf_size + 1), most)) if most else 0
    split = assign_leaves(counts, samples=samples, leaf_size=leaf_size)
    assert_sound(split, samples, len(counts))
    assert leaves_of(split) == leaves_of(split_leaves(samples, 1, leaf_size))


STATED = Batch(global_batch=100, steps=4, micro_batch_cap=None)


def test_a_ragged_window_under_a_cap_takes_fewer_steps_but_a_stated_k_is_kept():
    capped = Batch(global_batch=64, steps=4, micro_batch_cap=16)
    assert split_for(20, 1, batch=capped).micro_batches == ((10, 10),)
    assert split_for(20, 1, batch=STATED).micro_batches == ((5, 5, 5, 5),)
    assert split_for(20, 1, batch=capped, reduction="reproducible").micro_batches == ((16, 4),)


def test_ten_thousand_ranks_share_their_tuples():
    split = split_window(10**6 + 7, 10_000, cap=3)
    assert len(set(map(id, split.micro_batches))) == 2
    leaves = split_leaves(10**6 + 7, 10_000, leaf_size=3)
    assert len(set(map(id, leaves.micro_batches))) <= 3


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: split_window(1, 1), "steps cap one"),
        (lambda: assign([], steps=1), "rank none"),
        (lambda: assign_leaves([1, 1], samples=9, leaf_size=3), "2 9 3"),
        (lambda: split_window(4, 2, steps=1).pieces(2), "rank 2"),
        (
            lambda: split_for(100, 2, batch=STATED, reduction="reproducible"),
            "accumulation.reduction=reproducible accumulation.micro_batch=13",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(call, names):
    with refused(PlanError, names):
        call()
