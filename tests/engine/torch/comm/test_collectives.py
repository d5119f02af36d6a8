"""The differentiable collectives are adjoint, pure, and agree with autograd in one process."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.engine.torch import (
    all_gather,
    all_reduce_mean,
    all_reduce_sum,
    run_in_threads,
)
from tests.engine.torch.processes import run_ranks

DTYPES = (torch.float64, torch.complex128)


def _inner(a, b):
    return torch.vdot(a.reshape(-1), b.reshape(-1)).real.item()


def _apply(name, x, group, sizes):
    if name == "gather":
        return all_gather(x, group, sizes)
    return {"sum": all_reduce_sum, "mean": all_reduce_mean}[name](x, group)


def _blocks(seed, sizes, dtype):
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(3, n, dtype=dtype, generator=made).t() for n in sizes]  # not contiguous


def _adjoint_sides(group, name, sizes, seed, dtype):
    """This rank's parts of sum <A x, u> and sum <x, A* u>."""
    x = _blocks(seed, sizes, dtype)[group.rank].requires_grad_()
    y = _apply(name, x, group, sizes)
    made = torch.Generator().manual_seed(seed + 1 + group.rank)
    u = torch.randn(*reversed(y.shape), dtype=dtype, generator=made).t()
    kept_x, kept_u = x.detach().clone(), u.clone()
    y.backward(u)
    assert torch.equal(x.detach(), kept_x)
    assert torch.equal(u, kept_u)
    return _inner(y.detach(), u), _inner(x.detach(), x.grad)


@given(
    data=st.data(),
    name=st.sampled_from(["sum", "mean", "gather"]),
    size=st.integers(1, 5),
    seed=st.integers(0, 2**30),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=60, deadline=None)
def test_backward_is_the_adjoint_and_modifies_nothing(data, name, size, seed, dtype):
    even = [data.draw(st.integers(0, 4))] * size
    uneven = data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
    sizes = uneven if name == "gather" else even
    sides = run_in_threads(size, lambda group: _adjoint_sides(group, name, sizes, seed, dtype))
    forward, backward = (sum(side) for side in zip(*sides, strict=True))
    assert forward == pytest.approx(backward, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", ["sum", "mean", "gather"])
def test_backward_is_the_adjoint_over_gloo(tmp_path, name):
    sizes = [1, 4, 2] if name == "gather" else [3, 3, 3]
    sides = run_ranks(3, tmp_path, _adjoint_sides, name, sizes, 7, torch.complex128)
    forward, backward = (sum(side) for side in zip(*sides, strict=True))
    assert forward == pytest.approx(backward, rel=1e-12)


def _loss(y, weight):
    """A loss that is not linear, another one on each rank."""
    return ((y * weight).sin() ** 2).sum() + (y**3).mean()


def _whole(name, xs):
    if name == "gather":
        return torch.cat(xs)
    return sum(xs) / (len(xs) if name == "mean" else 1)


@pytest.mark.parametrize("name", ["sum", "mean", "gather"])
def test_first_and_second_derivatives_are_those_of_one_process(name):
    sizes = [2, 1, 3] if name == "gather" else [2, 2, 2]

    def penalty_on(group):
        """d/dx of the squared norm of the gradient of all ranks' losses, and that gradient."""
        x = _blocks(3, sizes, torch.float64)[group.rank].requires_grad_()
        loss = _loss(_apply(name, x, group, sizes), 1.0 + group.rank)
        [first] = torch.autograd.grad(loss, x, create_graph=True)
        [second] = torch.autograd.grad((first**2).sum(), x)
        return first.detach(), second

    xs = [x.requires_grad_() for x in _blocks(3, sizes, torch.float64)]
    losses = sum(_loss(_whole(name, xs), 1.0 + rank) for rank in range(3))
    firsts = torch.autograd.grad(losses, xs, create_graph=True)
    seconds = torch.autograd.grad(sum((first**2).sum() for first in firsts), xs)
    for rank, (first, second) in enumerate(run_in_threads(3, penalty_on)):
        torch.testing.assert_close(first, firsts[rank].detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(second, seconds[rank], rtol=1e-12, atol=1e-12)


def test_what_cannot_be_gathered_is_refused():
    def scalar(group):
        all_gather(torch.ones(()), group)

    def wrong(group):
        all_gather(torch.ones(2), group, sizes=[2, 3])

    with pytest.raises(ValueError, match=r"needs an axis 0"):
        run_in_threads(2, scalar)
    with pytest.raises(ValueError, match=r"with 2 for rank 1, but is \[2, 3\]"):
        run_in_threads(2, wrong)
