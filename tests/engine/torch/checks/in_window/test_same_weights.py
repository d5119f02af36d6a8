"""Ranks that drift apart are told of it at a boundary, in every mode, with names."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from orchestrator import Job, Loss
from orchestrator.engine.api import MicroBatch, Window
from orchestrator.engine.common.boundary.packed_sums import DIGEST_BITS, NARROW, WIDE, Trailer
from orchestrator.engine.common.replicas import MOST_SHARES, Piece, shares_of
from orchestrator.engine.settings import EngineSettings
from orchestrator.engine.torch import build_engine, run_in_threads
from orchestrator.engine.torch.checks.in_window.same_weights import digests_of, joined_digests
from orchestrator.errors import ReplicasDiffer

RANKS, SAMPLES = 3, 12

WAYS = {
    "fast": {},
    "narrow wire": {"wire": "bfloat16"},
    "sharded": {"shard_optimizer": True},
    "reproducible": {"reduction": "reproducible", "leaf_size": 2},
    "float16": {"precision": "float16"},
    "float64": {"precision": "float64"},
}


def nudge(model):
    model[0].weight.data[1, 2] += 1e-6


def swap_rows(model):
    model[2].weight.data = model[2].weight.data.flip(0)


def scale(model):
    for parameter in model.parameters():
        parameter.mul_(1.001)


def touch_what_is_frozen(model):
    model[3].bias[0] += 1


CHANGES = {
    nudge: "0.weight",
    swap_rows: "2.weight",
    scale: "0.weight",
    touch_what_is_frozen: "3.bias",
}


class Drifts(Job):
    """Changes weights on one rank after an update."""

    def __init__(self, rank, change, after=1, width=4):
        self.mine, self.change, self.after, self.width = rank == 1, change, after, width

    def model(self):
        width = self.width
        layers = [nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2), nn.Linear(2, 1)]
        layers[3].requires_grad_(False)
        return nn.Sequential(*layers)

    def dataset(self):
        x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(3))
        return TensorDataset(x, x.sum(1, keepdim=True).sin())

    def loss(self, model, batch):
        x, y = batch
        return Loss(((model(x) - y) ** 2).sum(), len(x))

    def after_update(self, model, update):
        if self.mine and update == self.after:
            self.change(model)


def _window(rank, update):
    each = SAMPLES // RANKS
    starts = range(rank * each, (rank + 1) * each, 2)
    return Window(
        update=update,
        samples=SAMPLES,
        micro_batches=tuple(
            MicroBatch(update=update, start=start, indices=(start, start + 1)) for start in starts
        ),
        steps=each // 2,
        learning_rate=1e-6,
    )


def _trained(job_of, updates, **settings):
    """What each rank raised, or None; and how many updates it did before."""

    def be(group):
        engine = build_engine(job_of(group.rank), EngineSettings(**settings), group)
        done = 0
        try:
            windows = [_window(group.rank, update) for update in range(updates)]
            batches = engine.batches(m for window in windows for m in window.micro_batches)
            for window in windows:
                engine.begin_window(window)
                for micro_batch in window.micro_batches:
                    engine.micro_step(next(batches), micro_batch)
                engine.boundary()
                done += 1
            engine.check_replicas()
        except ReplicasDiffer as error:
            return str(error), done
        finally:
            engine.accumulator.close()
        return None, done

    return run_in_threads(RANKS, be)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_on_one_rank_is_refused_at_the_next_boundary_by_all(way, change):
    told = _trained(lambda rank: Drifts(rank, change), 5, **WAYS[way])
    assert len(set(told)) == 1, told
    sentence, done = told[0]
    assert done == 2
    assert "the weights of rank 1 are no longer those of most ranks" in sentence
    assert f"first in parameter {CHANGES[change]}:" in sentence
    assert "between the start of update 1 and the step of update 2" in sentence


def test_a_change_after_the_last_update_is_refused_at_the_end():
    told = _trained(lambda rank: Drifts(rank, nudge, after=3), 4)
    assert len(set(told)) == 1
    assert told[0][1] == 4
    assert "between the start of update 3 and the end of update 3" in told[0][0]


def test_a_change_in_a_larger_net_is_found_within_so_many_updates_as_there_are_shares():
    told = _trained(lambda rank: Drifts(rank, nudge, after=0, width=2**17), 40)
    sentence, done = told[0]
    assert len(set(told)) == 1
    assert 1 <= done <= MOST_SHARES
    assert "rank 1" in sentence
    assert "0.weight" in sentence


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_stay_alike_are_left_alone(way):
    assert _trained(lambda rank: Drifts(-1, nudge), 3, **WAYS[way]) == [(None, 3)] * RANKS


class Remembers(Drifts):
    """Counts in a buffer what its rank has seen, and in another one the updates."""

    def __init__(self, rank, *, samples):
        super().__init__(rank, nudge, after=-1)
        self.samples = samples

    def model(self):
        model = super().model()
        model.register_buffer("seen", torch.zeros(()))
        model.register_buffer("updates", torch.zeros(()))
        return model

    def loss(self, model, batch):
        if self.samples:
            model.seen += batch[0].sum()
        return super().loss(model, batch)

    def after_update(self, model, update):
        model.updates += 1


def test_buffers_that_differ_are_told_of_once_and_end_nothing():
    def train(samples):
        return _trained(lambda rank: Remembers(rank, samples=samples), 2)

    assert train(samples=False) == [(None, 2)] * RANKS
    with pytest.warns(
        UserWarning, match="no longer ha.* the buffers of the others: seen. Chec"
    ) as w:
        assert train(samples=True) == [(None, 2)] * RANKS
    assert len(w) == 1


digests = st.integers(0, 2**DIGEST_BITS - 1)


@given(st.lists(digests, min_size=1, max_size=300), digests, st.booleans())
def test_ranks_are_alike_exactly_if_their_digests_are_equal(told, digest, same):
    told = [digest] * len(told) if same else told
    bits, dtype = (WIDE, torch.float64) if len(told) > 256 else (NARROW, torch.float32)
    travelled = torch.zeros(len(Trailer().numbers()), dtype=dtype)
    for one in told:
        mine = Trailer()
        mine.tell(one)
        travelled += torch.tensor(mine.numbers(bits), dtype=dtype)
    assert Trailer.of(travelled.tolist(), 0, bits).alike(len(told)) == (len(set(told)) == 1)


@given(
    st.sampled_from(
        [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int8]
    ),
    st.integers(1, 300),
    st.data(),
)
def test_any_change_of_a_number_and_any_two_that_change_places_change_the_digest(dtype, size, data):
    made = torch.Generator().manual_seed(size)
    tensor = (torch.randn(size, generator=made) * 8).round().to(dtype)
    [before] = digests_of([tensor])([Piece(0, 0, size)])
    i, j = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    other = tensor.clone()
    if tensor[i] != tensor[j]:
        other[[i, j]] = tensor[[j, i]]
    else:
        other[i] += 1
    [after] = digests_of([other])([Piece(0, 0, size)])
    assert before != after
    assert [before] == digests_of([tensor.clone()])([Piece(0, 0, size)])


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64, None]),
    st.data(),
)
def test_any_change_in_one_of_some_pieces_changes_what_is_told_of_them(sizes, dtype, data):
    dtypes = [dtype or [torch.float32, torch.bfloat16][n % 2] for n in range(len(sizes))]
    tensors = [torch.randn(size).to(kind) for size, kind in zip(sizes, dtypes, strict=True)]
    pieces = [Piece(n, data.draw(st.integers(0, s - 1)), s) for n, s in enumerate(sizes)]
    told = joined_digests(tensors, digests_of(tensors), pieces)
    assert len(told) == (1 if len(set(dtypes)) == 1 else len(pieces))
    assert told == joined_digests(tensors, digests_of(tensors), pieces)
    piece = data.draw(st.sampled_from(pieces))
    tensors[piece.number][data.draw(st.integers(piece.start, piece.end - 1))] += 1
    assert told != joined_digests(tensors, digests_of(tensors), pieces)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=40), st.sampled_from([2, 4, 8]))
def test_shares_are_every_number_once_in_order_and_not_too_many(sizes, itemsize):
    shares = shares_of(sizes, [itemsize] * len(sizes))
    pieces = [piece for share in shares for piece in share]
    assert len(shares) <= MOST_SHARES
    assert all(shares) or not pieces
    for number, size in enumerate(sizes):
        spans = [(piece.start, piece.end) for piece in pieces if piece.number == number]
        assert [place for span in spans for place in span] == sorted(
            place for span in spans for place in span
        )
        assert sum(end - start for start, end in spans) == size
