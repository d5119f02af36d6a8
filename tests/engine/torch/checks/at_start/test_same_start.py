"""Ranks that do not start alike are told so when an accumulator is built, or are made alike."""

import pytest
import torch
from torch import nn, optim

from orchestrator.engine.torch import Accumulator, Loss, TorchGroup, run_in_threads
from orchestrator.errors import JobError

RANKS, ODD = 3, 1


class Net(nn.Module):
    """Parameters and buffers of many kinds."""

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


def _add(tensor):
    return lambda net: getattr(net, tensor).data.add_(1)


def _other_layer(net):
    net.linear = nn.Linear(3, 4)


CASES = {
    "a weight": (lambda net: net.linear.weight.data.mul_(1 + 1e-6), _sgd, {}, "linear.weight"),
    "a frozen weight": (_add("frozen"), _sgd, {}, "numbers of frozen"),
    "a complex one": (lambda net: net.turn.data.mul_(1j), _sgd, {}, "numbers of turn"),
    "a buffer": (_add("seen"), _sgd, {}, "numbers of seen"),
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
    "wire": (_nothing, _sgd, {"wire": "bfloat16"}, "wire"),
    "reduction": (_nothing, _sgd, {"reduction": "reproducible"}, "reduction"),
    "shards": (_nothing, _sgd, {"shard_optimizer": True}, "shard_optimizer"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_differs_is_named_on_all_ranks_alike(case):
    change, build, settings, named = CASES[case]

    def be(group):
        net, odd = _net(), group.rank == ODD
        if odd:
            change(net)
        optimizer = build(net, odd) if build not in (_sgd, _adam) else build(net)
        with pytest.raises(JobError, match=f"rank 1 differs from the others.*{named}") as caught:
            Accumulator(net, optimizer, group, **(settings if odd else {}))
        return str(caught.value)

    assert len(set(run_in_threads(RANKS, be))) == 1


def test_to_be_alike_takes_one_small_exchange_and_none_alone():
    def be(group):
        net = _net()
        ours = Accumulator(net, _sgd(net), group)
        ours.close()
        return group.counters.collectives, group.counters.bytes_on_wire

    assert run_in_threads(RANKS, be) == [(1, 40 * (RANKS - 1))] * RANKS
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
        ours = Accumulator(net, _sgd(net), group, broadcast=True)
        ours.close()
        return [tensor.detach().clone() for tensor in (*net.parameters(), *net.buffers())]

    first, *others = run_in_threads(RANKS, be)
    for other in others:
        for ours, theirs in zip(first, other, strict=True):
            assert torch.equal(ours, theirs)


def test_broadcast_does_not_hide_another_model():
    def be(group):
        net = _net()
        if group.rank == ODD:
            _other_layer(net)
        with pytest.raises(JobError, match="ranks do not start alike: rank 1 differs"):
            Accumulator(net, _sgd(net), group, broadcast=True)

    run_in_threads(RANKS, be)


def test_a_compiled_wrapper_is_taken_as_the_model_that_it_wraps():
    net = nn.Linear(3, 1)
    wrapped = torch.compile(net, backend="eager")
    ours = Accumulator(wrapped, optim.SGD(net.parameters(), lr=0.1), TorchGroup.alone())
    before = net.weight.detach().clone()
    ours.backward(Loss(wrapped(torch.ones(1, 3)).sum(), 1), last=True)
    ours.boundary()
    torch.testing.assert_close(net.weight, before - 0.1)
