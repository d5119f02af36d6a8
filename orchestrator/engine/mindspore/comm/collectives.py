"""Collectives with a gradient: the backward is the adjoint of the map on the stacked ranks.

| forward, on every rank | backward on rank r |
|---|---|
| `AllReduceSum`: y = sum_q x_q | sum_q g_q |
| `AllReduceMean`: y = (1/R) sum_q x_q | (1/R) sum_q g_q |
| `AllGather`: y = [x_0, ..., x_{R-1}], blocks of any size | block r of sum_q g_q |

They stand in for the framework's own, whose backward is wrong or missing: that of `ops.AllGather`
needs ReduceScatter, which MCCL does not have, and that of `ops.Broadcast` is the identity. They
work in PyNative mode and under `jit`. Every rank has to run the same ones in the same order,
backward included: a graph drops a collective whose result one rank does not use, and then pairs
the others wrongly. Differentiating twice is not supported; MindSpore refuses it with a message of
its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from orchestrator.engine.mindspore.comm.process_group import MindSporeGroup


class _Gather(nn.Cell):
    """Concatenate equal blocks. No gradient of its own.

    MCCL keeps a float32's digits of a float64, so one travels as three float32 that add up to it.
    """

    def __init__(self, group: MindSporeGroup) -> None:
        super().__init__()
        self.mccl = group.transport == "mccl"
        self.gather: Any = ops.AllGather()

    def construct(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.mccl and x.dtype == ms.float64:
            high = x.astype(ms.float32)
            rest = x - high.astype(ms.float64)
            middle = rest.astype(ms.float32)
            low = (rest - middle.astype(ms.float64)).astype(ms.float32)
            whole = self.gather(high).astype(ms.float64) + self.gather(middle).astype(ms.float64)
            return whole + self.gather(low).astype(ms.float64)
        return self.gather(x)


class _Sum(nn.Cell):
    """The plain sum over ranks, by what the transport has for the dtype. No gradient of its own."""

    def __init__(self, group: MindSporeGroup) -> None:
        super().__init__()
        self.ranks = group.size
        self.alone = group.size == 1
        self.mccl = group.transport == "mccl"
        self.reduce: Any = None if self.alone else ops.AllReduce()
        self.gather: Any = None if self.alone else _Gather(group)

    def construct(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.alone:
            return x
        if self.mccl and x.dtype == ms.float64:  # MCCL reduces no float64
            parts = self.gather(x.reshape(-1))
            return parts.reshape(self.ranks, -1).sum(axis=0).reshape(x.shape)
        return self.reduce(x)


class AllReduceSum(nn.Cell):
    """y = sum_q x_q on every rank; backward: sum_q g_q. Any shape, float32, float16 or float64."""

    def __init__(self, group: MindSporeGroup) -> None:
        super().__init__()
        self.total: Any = _Sum(group)

    def construct(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.total(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:  # noqa: ARG002  # MindSpore's form
        return (self.total(dout),)


class AllReduceMean(nn.Cell):
    """y = (1/R) sum_q x_q on every rank; backward: (1/R) sum_q g_q."""

    def __init__(self, group: MindSporeGroup) -> None:
        super().__init__()
        self.total: Any = _Sum(group)
        self.share = 1.0 / group.size

    def construct(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.total(x) * self.share

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:  # noqa: ARG002  # MindSpore's form
        return (self.total(dout) * self.share,)


class _EqualGather(nn.Cell):
    """Concatenate equal blocks; backward: block r of the summed gradient."""

    def __init__(self, group: MindSporeGroup, rows: int) -> None:
        super().__init__()
        self.total: Any = _Sum(group)
        self.gather: Any = _Gather(group)
        self.start, self.stop = group.rank * rows, (group.rank + 1) * rows

    def construct(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.gather(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:  # noqa: ARG002  # MindSpore's form
        return (self.total(dout)[self.start : self.stop],)


class AllGather(nn.Cell):
    """y = [x_0, ..., x_{R-1}] along axis 0 on every rank; backward: block r of sum_q g_q.

    Args:
        group: the ranks.
        sizes: leading sizes n_0..n_{R-1}, each at least 1; equal on all ranks.

    The input's shape is (n_r, ...), the output's (sum of sizes, ...). Uneven blocks travel padded.
    """

    def __init__(self, group: MindSporeGroup, sizes: Sequence[int]) -> None:
        super().__init__()
        if len(sizes) != group.size or min(sizes) < 1:
            raise ValueError(
                f"`sizes` must be {group.size} leading sizes of at least 1, but is {list(sizes)}"
            )
        self.alone = group.size == 1
        self.longest = max(sizes)
        self.missing = self.longest - sizes[group.rank]
        self.even = min(sizes) == self.longest
        self.spans = tuple(
            (place * self.longest, place * self.longest + size) for place, size in enumerate(sizes)
        )
        self.equal: Any = None if self.alone else _EqualGather(group, self.longest)

    def construct(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.alone:
            return x
        padded = x
        if self.missing:
            padded = ops.concat((x, ops.zeros((self.missing, *x.shape[1:]), x.dtype)))
        gathered = self.equal(padded)
        if self.even:
            return gathered
        pieces: Any = ()
        for start, stop in self.spans:
            pieces = (*pieces, gathered[start:stop])
        return ops.concat(pieces)
