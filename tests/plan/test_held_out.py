"""Held-out data are cut into pieces from lengths alone, and dealt to ranks in order."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import PlanError
from orchestrator.plan.batch import Batch, resolve_batch
from orchestrator.plan.held_out import NO_UPDATE, cut_held_out, piece_size, share_of
from orchestrator.plan.split import split_for
from tests.refusals import refused


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    size=st.integers(1, 9),
    ranks=st.integers(1, 12),
)
def test_any_ranks_together_have_each_sample_once_in_the_same_pieces(lengths, size, ranks):
    pieces = cut_held_out(lengths, size)
    dealt = [share_of(pieces, rank, ranks) for rank in range(ranks)]
    assert tuple(chain.from_iterable(share.pieces for share in dealt)) == pieces
    indices = [i for share in dealt for m in share.micro_batches() for i in m.indices]
    assert indices == list(range(sum(lengths)))
    assert max(piece.samples for piece in pieces) <= size
    ends = list(chain.from_iterable([piece.data_set] * piece.samples for piece in pieces))
    assert ends == list(chain.from_iterable([n] * length for n, length in enumerate(lengths)))
    counts = [len(share.pieces) for share in dealt]
    assert max(counts) - min(counts) <= 1


def test_micro_batches_of_a_share_belong_to_no_update():
    [micro_batch] = share_of(cut_held_out([3], 5), 0, 1).micro_batches()
    assert (micro_batch.update, micro_batch.start) == (NO_UPDATE, 0)


def test_ranks_of_a_copy_get_equally_many_pieces_of_which_padding_counts_nothing():
    pieces = cut_held_out([10], 2)  # 5 pieces: 2, 1, 1, 1 for four ranks
    shares = [share_of(pieces, rank, 4, shard_ranks=(0, 1)) for rank in range(2)]
    assert [len(share.pieces) for share in shares] == [2, 2]
    assert [share.padding for share in shares] == [0, 1]
    assert share_of(pieces, 3, 4, shard_ranks=(2, 3)).padding == 0


def test_pieces_can_be_dealt_by_cost():
    pieces = cut_held_out([10], 2)
    shares = [share_of(pieces, rank, 3, pieces_per_rank=[0, 4, 1]) for rank in range(3)]
    assert [len(share.pieces) for share in shares] == [0, 4, 1]
    for wrong in ([5, 0], [1, 1, 1], [6, 0, -1]):
        with refused(PlanError, f"pieces_per_rank 5 3 {wrong}"):
            share_of(pieces, 0, 3, pieces_per_rank=wrong)


@pytest.mark.parametrize(
    ("steps", "cap", "sizes"),
    [
        (1, None, [64, 64, 64, 64, 32, 32, 2, 1]),
        (4, None, [16, 16, 16, 16, 8, 8, 1, 1]),
        (4, 12, [12, 12, 12, 12, 12, 12, 2, 1]),
        (1, 1000, [64, 64, 64, 64, 32, 32, 2, 1]),
    ],
)
def test_pieces_have_one_size_on_few_ranks_and_that_of_leaves_on_any(steps, cap, sizes):
    batch = Batch(global_batch=256, steps=steps, micro_batch_cap=cap)
    ranks = (1, 2, 3, 4, 5, 8, 100, 1000)
    assert [piece_size(batch, r) for r in ranks] == sizes
    if cap is not None:
        leaves = {piece_size(batch, r, reduction="reproducible") for r in ranks}
        assert leaves == {min(cap, 256)}


@given(
    global_batch=st.integers(1, 300),
    micro_batch=st.none() | st.integers(1, 100),
    steps=st.integers(1, 5),
    ranks=st.integers(1, 40),
)
def test_a_piece_is_no_larger_than_the_trainings_micro_batches_may_be(
    global_batch, micro_batch, steps, ranks
):
    batch = resolve_batch(
        global_batch=global_batch,
        steps=steps if micro_batch is None else None,
        micro_batch=micro_batch,
        ranks=ranks,
    )
    split = split_for(global_batch, ranks, batch=batch)
    largest = max(size for sizes in split.micro_batches for size in sizes)
    size = piece_size(batch, ranks)
    # The stated size is known to fit; a split may have to cut smaller ones.
    assert size <= largest or (micro_batch is not None and size <= micro_batch)
    assert size * ranks <= max(global_batch, ranks)
