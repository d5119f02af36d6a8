"""Differentiable collectives, whose backward is the true adjoint.

The gradient that flows back is that of the *sum of all ranks' losses*, sum_q l_q. With g_q =
dl_q/dy_q, what rank q's own loss sends back:

| function | shapes | forward, on every rank | backward, on rank r |
|---|---|---|---|
| `all_reduce_sum` | (*) -> (*) | y = sum_q x_q | sum_q g_q |
| `all_reduce_mean` | (*) -> (*) | y = 1/R sum_q x_q | 1/R sum_q g_q |
| `all_gather` | (n_r, *) -> (sum n_q, *) | y = concat(x_0 .. x_{R-1}) | block r of sum_q g_q |

A loss that every rank computes from the result is counted R times: divide it by R, or sum the
parameters' gradients of one rank's part only.

Forward and backward are collective: every rank calls both, in the same order. All dtypes
(complex included), any strides; neither the input nor the incoming gradient is modified. The
backward is made of these same functions, so it can be differentiated again. An adjoint A*
satisfies sum_r <A x, u>_r = sum_r <x, A* u>_r; tests check just that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from orchestrator.engine.torch.group import BaseGroup, flatten

# Tensors of autograd's contexts and `Function.apply` have no types in torch.
# pyright: reportUntypedFunctionDecorator=false


class AllReduceSum(Function):
    """y = sum_q x_q; its own adjoint. Use `all_reduce_sum`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: BaseGroup) -> Tensor:
        """Shape (*) -> (*)."""
        ctx.group = group
        y = x.clone(memory_format=torch.contiguous_format)  # the sum is made in place
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
        return AllReduceSum.forward(ctx, x, group).div_(group.size)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        """1/R sum_q g_q."""
        return all_reduce_mean(grad_outputs[0], ctx.group), None


class AllGather(Function):
    """y = concat(x_0 .. x_{R-1}) along axis 0. Use `all_gather`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: BaseGroup, sizes: Sequence[int] | None) -> Tensor:
        """Shape (n_r, *) -> (sum n_q, *)."""
        gathered = group.all_gather(x, sizes)
        ctx.group, ctx.sizes = group, sizes or (x.shape[0],) * group.size
        return gathered

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
        whole = g.clone(memory_format=torch.contiguous_format)
        if g.numel() and min(sizes) == max(sizes):
            block = g.new_empty((sizes[group.rank], *g.shape[1:]))
            group.reduce_scatter_sum_async(flatten(block), flatten(whole)).wait()
            return block
        group.all_reduce_sum(whole)  # transports scatter equal blocks only
        first = sum(sizes[: group.rank])
        # A view would keep the memory of all blocks.
        return whole[first : first + sizes[group.rank]].clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None]:
        """Return the ranks' gradients, concatenated."""
        return all_gather(grad_outputs[0], ctx.group, ctx.sizes), None, None


def all_reduce_sum(x: Tensor, group: BaseGroup) -> Tensor:
    """Return the sum of the ranks' `x`, as a new tensor. Same shape (*) and dtype on all ranks.

    Backward: sum_q g_q (an all-reduce). Collective in both directions.
    """
    return AllReduceSum.apply(x, group)


def all_reduce_mean(x: Tensor, group: BaseGroup) -> Tensor:
    """Return the mean of the ranks' `x`, as a new tensor. Same shape (*) and floating dtype on all
    ranks.

    Backward: 1/R sum_q g_q (an all-reduce). Collective in both directions.
    """
    return AllReduceMean.apply(x, group)


def all_gather(x: Tensor, group: BaseGroup, sizes: Sequence[int] | None = None) -> Tensor:
    """Return the ranks' `x` one after the other along axis 0, as a new tensor: (n_r, *) -> (sum
    n_q, *).

    Backward: block r of sum_q g_q. Collective in both directions.

    Args:
        x: this rank's block; all axes but the first agree between ranks.
        sizes: the R leading sizes where they differ; None when all are equal.

    Raises:
        ValueError: `x` has no axis 0, or is not of the size that `sizes` says.
    """
    return AllGather.apply(x, group, sizes)
