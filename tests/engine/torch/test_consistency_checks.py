"""Ranks start equal and stay equal."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim
from torch.utils.data import TensorDataset

from orchestrator import Job, Loss
from orchestrator.engine.common.replicas import MAX_PARTITIONS, WeightRange, partition_weights
from orchestrator.engine.common.trailer import DIGEST_BITS, NARROW, WIDE, Trailer
from orchestrator.engine.torch import Accumulator
from orchestrator.engine.torch.consistency_checks import digests_of
from orchestrator.errors import JobError, ReplicasDiffer
from orchestrator.local_ranks.threads import run_in_threads
from orchestrator.plan.split import assign
from tests.engine.torch.jobs import engine_of
from tests.engine.windows import run, window_of

RANKS, ODD = 3, 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.frozen = nn.Parameter(torch.ones(2, 3).t(), requires_grad=False)
        self.turn = nn.Parameter(torch.ones(2, dtype=torch.complex64).conj())
        self.short = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False]), persistent=False)
        self.register_buffer("none", torch.empty(0))


def _net():
    torch.manual_seed(0)
    return Net()


def _sgd(net, **more):
    return optim.SGD([p for p in net.parameters() if p.requires_grad], **{"lr": 0.1, **more})


def _adam(net, amsgrad=False):
    return optim.Adam([p for p in net.parameters() if p.requires_grad], amsgrad=amsgrad)


def _with_state(net, value):
    optimizer = _adam(net)
    optimizer.state[net.short]["exp_avg"] = torch.full((3,), value)
    return optimizer


def _nothing(net):
    del net


def _other_layer(net):
    net.linear = nn.Linear(3, 4)


CASES = {
    "a weight": (lambda net: net.linear.weight.data.mul_(1 + 1e-6), _sgd, {}, "linear.weight"),
    "a frozen weight": (lambda net: net.frozen.data.add_(1), _sgd, {}, "numbers of frozen"),
    "a complex one": (lambda net: net.turn.data.mul_(1j), _sgd, {}, "numbers of turn"),
    "a buffer": (lambda net: net.seen.add_(1), _sgd, {}, "numbers of seen"),
    "a buffer not saved": (lambda net: net.mask.logical_not_(), _sgd, {}, "numbers of mask"),
    "a shape": (_other_layer, _sgd, {}, r"number 3: it is linear.weight \(float32 \(4, 3\)"),
    "one more": (lambda n: n.register_parameter("x", nn.Parameter(torch.ones(1))), _sgd, {}, "x"),
    "frozen": (lambda net: net.short.requires_grad_(requires_grad=False), _sgd, {}, "short"),
    "rate": (_nothing, lambda net, odd: _sgd(net, lr=0.2 if odd else 0.1), {}, "lr of the opt"),
    "amsgrad": (_nothing, lambda net, odd: _adam(net, amsgrad=odd), {}, "amsgrad of the opt"),
    "kind": (_nothing, lambda net, odd: (_sgd if odd else _adam)(net), {}, "it is SGD on rank 1"),
    "state": (_nothing, _with_state, {}, "exp_avg of short"),
    "clip_norm": (_nothing, _sgd, {"clip_norm": 2.0}, "clip_norm: it is 2.0 on rank 1, and None"),
    "metrics": (_nothing, _sgd, {"metric_names": ("right",)}, "metric_names"),
    "buckets": (_nothing, _sgd, {"bucket_bytes": 64}, "bucket_bytes"),
    "reduction": (_nothing, _sgd, {"reduction": "reproducible"}, "reduction"),
    "shards": (_nothing, _sgd, {"shard_optimizer": True}, "shard_optimizer"),
}


@pytest.mark.parametrize(
    ("case", "broadcast"), [*((case, False) for case in CASES), ("a shape", True)]
)
def test_differences_are_the_same_message_on_all_ranks(case, broadcast):
    change, build, settings, named = CASES[case]

    def be(group):
        net, odd = _net(), group.rank == ODD
        if odd:
            change(net)
        optimizer = build(net, odd) if build not in (_sgd, _adam) else build(net)
        with pytest.raises(JobError, match=f"rank 1 differs from the others.*{named}") as caught:
            Accumulator(net, optimizer, group, broadcast=broadcast, **(settings if odd else {}))
        return str(caught.value)

    assert len(set(run_in_threads(RANKS, be))) == 1


def test_the_start_check_takes_one_small_exchange_and_none_on_one_rank():
    def be(group):
        net = _net()
        Accumulator(net, _sgd(net), group)
        return group.counters.collectives, group.counters.bytes_on_wire

    assert run_in_threads(RANKS, be) == [(1, 8 * (RANKS - 1))] * RANKS
    assert run_in_threads(1, be) == [(0, 0)]


def test_broadcast_gives_all_ranks_rank_0s_numbers_of_every_type():
    def be(group):
        torch.manual_seed(group.rank)
        net = Net()
        with torch.no_grad():
            for tensor in (*net.parameters(), net.seen):
                tensor.add_(group.rank)
            if group.rank:
                net.mask.logical_not_()
        Accumulator(net, _sgd(net), group, broadcast=True)
        return [tensor.detach().clone() for tensor in (*net.parameters(), *net.buffers())]

    first, *others = run_in_threads(RANKS, be)
    for other in others:
        for ours, theirs in zip(first, other, strict=True):
            assert torch.equal(ours, theirs)


# ------------------------------------------------------------------ Weights digest


WAYS = {
    "fast": {},
    "sharded": {"shard_optimizer": True},
    "reproducible": {"reduction": "reproducible"},
    "float16": {"precision": "float16"},
    "float64": {"precision": "float64"},
}


def nudge(model):
    model[0].weight.data[1, 2] += 1e-6


def touch_what_is_frozen(model):
    model[3].bias[0] += 1


CHANGES = {nudge: "0.weight", touch_what_is_frozen: "3.bias"}


class Drifts(Job):
    def __init__(self, rank, change, after=1, width=4):
        self.mine, self.change, self.after, self.width = rank == ODD, change, after, width

    def model(self):
        width = self.width
        layers = [nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2), nn.Linear(2, 1)]
        layers[3].requires_grad_(False)
        return nn.Sequential(*layers)

    def dataset(self):
        x = torch.randn(4 * RANKS, 4, generator=torch.Generator().manual_seed(3))
        return TensorDataset(x, x.sum(1, keepdim=True).sin())

    def loss(self, model, batch):
        x, y = batch
        return Loss(((model(x) - y) ** 2).sum(), len(x))

    def after_update(self, model, update):
        if self.mine and update == self.after:
            self.change(model)


def _trained(job_of, updates, **settings):
    """Return each rank's error, or None, and the number of its updates before."""

    def be(group):
        engine = engine_of(job_of(group.rank), group, **settings)
        done = 0
        try:
            for update in range(updates):
                split = assign([4] * RANKS, cap=2)
                run(engine, [window_of(split, group.rank, update, rate=1e-6)])
                done += 1
            engine.check_replicas()
        except ReplicasDiffer as error:
            return str(error), done
        finally:
            engine.accumulator.close()
        return None, done

    return run_in_threads(RANKS, be)


@pytest.mark.parametrize(
    ("way", "change"),
    [*(("fast", change) for change in CHANGES), *((way, nudge) for way in WAYS if way != "fast")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_change_on_one_rank_is_refused_at_the_next_boundary_by_all(way, change):
    results = _trained(lambda rank: Drifts(rank, change), 5, **WAYS[way])
    assert len(set(results)) == 1, results
    sentence, done = results[0]
    assert done == 2
    assert "the weights of rank 1 are no longer those of most ranks" in sentence
    assert f"first in parameter {CHANGES[change]}:" in sentence
    assert "between the start of update 1 and the step of update 2" in sentence


def test_a_change_after_the_last_update_is_refused_at_the_end():
    results = _trained(lambda rank: Drifts(rank, nudge, after=3), 4)
    assert len(set(results)) == 1
    assert results[0][1] == 4
    assert "between the start of update 3 and the end of update 3" in results[0][0]


def test_a_change_in_a_larger_net_is_found_within_so_many_updates_as_there_are_shares():
    results = _trained(lambda rank: Drifts(rank, nudge, after=0, width=2**17), 40)
    sentence, done = results[0]
    assert len(set(results)) == 1
    assert 1 <= done <= MAX_PARTITIONS
    assert "rank 1" in sentence
    assert "0.weight" in sentence


digests = st.integers(0, 2**DIGEST_BITS - 1)


@given(st.lists(digests, min_size=1, max_size=300), digests, st.booleans())
def test_digests_agree_exactly_if_they_are_equal(results, digest, same):
    results = [digest] * len(results) if same else results
    bits, dtype = (WIDE, torch.float64) if len(results) > 256 else (NARROW, torch.float32)
    travelled = torch.zeros(len(Trailer().numbers()), dtype=dtype)
    for one in results:
        mine = Trailer()
        mine.add_digest(one)
        travelled += torch.tensor(mine.numbers(bits), dtype=dtype)
    agree = Trailer.from_numbers(travelled.tolist(), bits).digests_agree(len(results))
    assert agree == (len(set(results)) == 1)


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
    [before] = digests_of([tensor], [WeightRange(0, 0, size)])
    i, j = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    other = tensor.clone()
    if tensor[i] != tensor[j]:
        other[[i, j]] = tensor[[j, i]]
    else:
        other[i] += 1
    [after] = digests_of([other], [WeightRange(0, 0, size)])
    assert before != after
    assert [before] == digests_of([tensor.clone()], [WeightRange(0, 0, size)])


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64, None]),
    st.data(),
)
def test_any_change_in_a_piece_changes_the_joint_digest(sizes, dtype, data):
    dtypes = [dtype or [torch.float32, torch.bfloat16][n % 2] for n in range(len(sizes))]
    tensors = [torch.randn(size).to(kind) for size, kind in zip(sizes, dtypes, strict=True)]
    pieces = [WeightRange(n, data.draw(st.integers(0, s - 1)), s) for n, s in enumerate(sizes)]
    results = digests_of(tensors, pieces, joint=True)
    assert len(results) == (1 if len(set(dtypes)) == 1 else len(pieces))
    assert results == digests_of(tensors, pieces, joint=True)
    piece = data.draw(st.sampled_from(pieces))
    tensors[piece.number][data.draw(st.integers(piece.start, piece.end - 1))] += 1
    assert results != digests_of(tensors, pieces, joint=True)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=40), st.sampled_from([2, 4, 8]))
def test_shares_are_every_number_once_in_order_and_not_too_many(sizes, itemsize):
    partitions = partition_weights(sizes, [itemsize] * len(sizes))
    pieces = [piece for partition in partitions for piece in partition]
    assert len(partitions) <= MAX_PARTITIONS
    assert all(partitions) or not pieces
    for number, size in enumerate(sizes):
        spans = [(piece.start, piece.end) for piece in pieces if piece.number == number]
        assert [place for span in spans for place in span] == sorted(
            place for span in spans for place in span
        )
        assert sum(end - start for start, end in spans) == size
