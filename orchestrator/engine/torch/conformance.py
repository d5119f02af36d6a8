"""Requirements on groups of torch tensors, besides those on all groups (`engine/conformance.py`).

Each check is collective: it is called on every rank, and raises `AssertionError` where the contract
is broken. `all_checks` calls them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from orchestrator.engine.conformance import CHECKS, expect
from orchestrator.engine.torch.accumulator import Accumulator
from orchestrator.engine.torch.collectives import all_gather, all_reduce_mean, all_reduce_sum
from orchestrator.engine.torch.group import BaseGroup, gather_numbers
from orchestrator.job import Loss

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.complex64,
    torch.complex128,
)
SAMPLES = 13


class TorchArrays:
    """Torch tensors on a group's device for the suite of all groups."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device

    def make(self, values: Sequence[Any], shape: Sequence[int]) -> Tensor:
        numbers = torch.tensor(list(values), dtype=torch.float32, device=self.device)
        return numbers.reshape(list(shape))

    def read(self, tensor: Tensor) -> list[float]:
        return tensor.reshape(-1).tolist()


def _expect_equal(actual: Tensor, wanted: Tensor, what: str) -> None:
    expect((actual.dtype, actual.tolist()), (wanted.dtype, wanted.tolist()), what)


def accepts_every_dtype_and_stride(group: BaseGroup) -> None:
    """Test sums, broadcasts and gathers of tensors as models have them."""
    total, last = sum(range(group.size + 1)), group.size - 1
    sizes = [rank + 1 for rank in range(group.size)]
    for dtype in DTYPES:
        own = torch.full((2, 3), group.rank + 1, device=group.device).to(dtype)
        for tensor in (own.clone(), own.t().contiguous().t(), own.repeat(1, 2)[:, ::2]):
            before = tensor.stride()
            group.all_reduce_sum(tensor)
            _expect_equal(tensor.cpu(), torch.full((2, 3), total).to(dtype), f"sum of {dtype}")
            expect(tensor.stride(), before, "strides after a sum")
            group.broadcast(tensor, last)
        part = torch.full((sizes[group.rank], 2), group.rank, device=group.device).to(dtype)
        gathered = group.all_gather(part.t().contiguous().t(), sizes)
        wanted = torch.cat([torch.full((n, 2), rank).to(dtype) for rank, n in enumerate(sizes)])
        _expect_equal(gathered.cpu(), wanted, f"gathered {dtype}")


def separates_concurrent_sums(group: BaseGroup) -> None:
    """Begin eight sums before waiting for the first."""
    ranks = range(group.size)
    tensors = [torch.full((1000,), float(group.rank + n), device=group.device) for n in range(8)]
    for work in [group.all_reduce_sum_async(tensor) for tensor in tensors]:
        work.wait()
    wanted = [float(sum(rank + n for rank in ranks)) for n in range(8)]
    expect([tensor[-1].item() for tensor in tensors], wanted, "sums that were under way at once")


def exchanges_pieces_with_all_to_all(group: BaseGroup) -> None:
    """Test `all_to_all` with a last rank that sends nothing and receives something."""
    giving = group.size - 1 or 1
    first = 100.0 * group.rank
    sent = torch.arange(2 * group.size, device=group.device) + first
    sent = sent if group.rank < giving else sent[:0]
    counts = [2 if rank < giving else 0 for rank in range(group.size)]
    received = torch.empty(sum(counts), device=group.device)
    group.all_to_all(received, sent, counts=counts)
    wanted = [100.0 * rank + 2 * group.rank + n for rank in range(giving) for n in (0, 1)]
    expect(received.tolist(), wanted, "pieces of all_to_all")


def moves_pieces_of_any_size(group: BaseGroup) -> None:
    """Test a reduce-scatter and a gather of pieces that are not equal, one of them empty."""
    sizes = [3 * rank for rank in range(group.size)]
    first = sum(sizes[: group.rank])
    whole = torch.arange(float(sum(sizes)), device=group.device)
    piece = whole[first : first + sizes[group.rank]]
    group.reduce_scatter_sum_async(piece, whole, sizes).wait()
    wanted = [float(group.size * n) for n in range(sum(sizes))]
    expect(piece.tolist(), wanted[first : first + len(piece)], "a sum of uneven pieces")
    group.gather_in_place_async(whole, sizes).wait()
    expect(whole.tolist(), wanted, "gathered uneven pieces")


def collectives_have_true_adjoints(group: BaseGroup) -> None:
    """Test the collectives inside models: their gradients, and the gradients of these."""
    sizes = [rank + 1 for rank in range(group.size)]
    draw = torch.Generator().manual_seed(group.rank)

    def drawn(rows: int) -> Tensor:
        numbers = torch.randn(rows, 2, generator=draw, dtype=torch.float64)
        return numbers.to(group.device).requires_grad_()

    gather = partial(all_gather, sizes=sizes)
    for call, rows in ((all_reduce_sum, 3), (all_reduce_mean, 3), (gather, sizes[group.rank])):
        x, v = drawn(rows), drawn(rows)
        y: Tensor = call(x, group)
        u = drawn(len(y))
        (back,) = torch.autograd.grad((y * u).sum(), x, create_graph=True)
        products = gather_numbers(group, [(y * u).sum().item(), (x * back).sum().item()])
        forward, backward = (sum(column) for column in zip(*products, strict=True))
        expect(math.isclose(forward, backward, rel_tol=1e-9, abs_tol=1e-12), True, "the adjoint")
        (again,) = torch.autograd.grad((back * v).sum(), u)
        expect(torch.allclose(again, call(v, group)), True, "the adjoint's gradient")


def an_update_equals_that_of_one_big_batch(group: BaseGroup) -> None:
    """Test `Accumulator` over uneven parts, with each of its reductions."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 3, generator=draw, dtype=torch.float64)
    owned = {"shard_optimizer": True, "shard_by": "parameters"}
    for options in ({}, {"shard_optimizer": True}, owned, {"reduction": "reproducible"}):
        part = x.tensor_split(group.size)[group.rank]
        weights = _after_an_update(group, part, **options)
        wanted = _after_an_update(None, x)
        if not torch.allclose(weights, wanted, rtol=1e-12, atol=0.0):
            raise AssertionError(f"weights after an update with {options}: {weights} for {wanted}")


def _after_an_update(group: BaseGroup | None, x: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2, dtype=torch.float64)
    if group is not None:
        model, x = model.to(group.device), x.to(group.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if group is None:
        (model(x).square().sum() / len(x)).backward()
        optimizer.step()
    else:
        accumulator = Accumulator(model, optimizer, group, **options)
        for part in x.split(1 if options.get("reduction") else 2):
            accumulator.backward(Loss(model(part).square().sum(), weight=len(part)))
        accumulator.boundary()
    return torch.cat([weight.detach().flatten().cpu() for weight in model.parameters()])


TORCH_CHECKS: tuple[Callable[[BaseGroup], None], ...] = (
    accepts_every_dtype_and_stride,
    separates_concurrent_sums,
    exchanges_pieces_with_all_to_all,
    moves_pieces_of_any_size,
    collectives_have_true_adjoints,
    an_update_equals_that_of_one_big_batch,
)


def all_checks(group: BaseGroup) -> str:
    """Run the suite of all groups and these checks, one after another; return the transport."""
    for check in CHECKS:
        check(group, TorchArrays(group.device))
    for torch_check in TORCH_CHECKS:
        torch_check(group)
    return group.transport
