"""Differentiable collectives with true adjoints.

Convention: the gradient that flows back is that of the *sum of all ranks' losses*, sum_q l_q. With
g_q = dl_q/dy_q, what rank q's own loss sends back:

| function | shapes | forward, on every rank | backward, on rank r |
|---|---|---|---|
| `all_reduce_sum` | (*) -> (*) | y = sum_q x_q | sum_q g_q |
| `all_reduce_mean` | (*) -> (*) | y = 1/R sum_q x_q | 1/R sum_q g_q |
| `all_gather` | (n_r, *) -> (sum n_q, *) | y = concat(x_0 .. x_{R-1}) | block r of sum_q g_q |

A loss that every rank computes alike from the result is then counted R times: divide it by R, or
sum the parameters' gradients of one rank's share only.

Forward and backward are collective: every rank has to call both, in the same order. All dtypes
(complex included), any strides; neither the input nor the incoming gradient is modified. The
backward is made of these same functions, so it can be differentiated again.
Source: an adjoint A* satisfies sum_r <A x, u>_r = sum_r <x, A* u>_r, and tests check just that.
"""

# Tensors of autograd's contexts and `Function.apply` have no types in torch.
# pyright: reportUntypedFunctionDecorator=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from orchestrator.engine.common.place_in_group import checked_sizes
from orchestrator.engine.torch.comm.base_group import BaseGroup


class AllReduceSum(Function):
    """y = sum_q x_q; its own adjoint. Use `all_reduce_sum`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: BaseGroup) -> Tensor:
        """Shape (*) -> (*)."""
        ctx.group = group
        y = x.clone(memory_format=torch.contiguous_format)
        group.all_reduce_sum(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        """sum_q g_q."""
        return all_reduce_sum(grad_outputs[0], ctx.group), None


class AllReduceMean(Function):
    """y = 1/R sum_q x_q; its own adjoint. Use `all_reduce_mean`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: BaseGroup) -> Tensor:
        """Shape (*) -> (*)."""
        ctx.group = group
        y = x.clone(memory_format=torch.contiguous_format)
        group.all_reduce_sum(y)
        return y.div_(group.size)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        """1/R sum_q g_q."""
        return all_reduce_mean(grad_outputs[0], ctx.group), None


class AllGather(Function):
    """y = concat(x_0 .. x_{R-1}) along axis 0. Use `all_gather`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: BaseGroup, sizes: Sequence[int] | None) -> Tensor:
        """Shape (n_r, *) -> (sum n_q, *)."""
        ctx.group, ctx.sizes = group, checked_sizes(x.shape, sizes, group.rank, group.size)
        return group.all_gather(x, sizes)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None]:
        """Block r of sum_q g_q."""
        return _Blocks.apply(grad_outputs[0], ctx.group, ctx.sizes), None, None


class _Blocks(Function):
    """x = block r of sum_q g_q, the adjoint of `AllGather`, whose adjoint is `AllGather` again."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, group: BaseGroup, sizes: Sequence[int]) -> Tensor:
        """Shape (sum n_q, *) -> (n_r, *)."""
        ctx.group, ctx.sizes = group, sizes
        # An all-reduce, since gloo has no reduce-scatter that is faster and takes uneven blocks.
        whole = g.clone(memory_format=torch.contiguous_format)
        group.all_reduce_sum(whole)
        first = sum(sizes[: group.rank])
        return whole[first : first + sizes[group.rank]].clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None]:
        """The ranks' gradients, concatenated."""
        return all_gather(grad_outputs[0], ctx.group, ctx.sizes), None, None


def all_reduce_sum(x: Tensor, group: BaseGroup) -> Tensor:
    """The sum of the ranks' `x`, as a new tensor. Same shape (*) and dtype on all ranks.

    Backward: sum_q g_q (an all-reduce). Collective in both directions.
    """
    return AllReduceSum.apply(x, group)


def all_reduce_mean(x: Tensor, group: BaseGroup) -> Tensor:
    """The mean of the ranks' `x`, as a new tensor. Same shape (*) and floating dtype on all ranks.

    Backward: 1/R sum_q g_q (an all-reduce). Collective in both directions.
    """
    return AllReduceMean.apply(x, group)


def all_gather(x: Tensor, group: BaseGroup, sizes: Sequence[int] | None = None) -> Tensor:
    """The ranks' `x` one after the other along axis 0, as a new tensor: (n_r, *) -> (sum n_q, *).

    Backward: block r of sum_q g_q. Collective in both directions.

    Args:
        x: this rank's block; all axes but the first agree between ranks.
        group: the ranks.
        sizes: the R leading sizes where they differ; None when all are equal.

    Raises:
        ValueError: `x` has no axis 0, or is not of the size that `sizes` says.
    """
    return AllGather.apply(x, group, sizes)
