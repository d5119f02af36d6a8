"""Groups over torch tensors."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from orchestrator.engine.api import Group, GroupSpec

version_of = attrgetter("_version")
"""Return how often a tensor was written in place. torch has no public name for it."""


def flatten(tensor: Tensor) -> Tensor:
    """Return the numbers as a contiguous real vector: a view where the strides allow, else a
    copy.
    """
    tensor = tensor.detach()
    # gloo takes no complex numbers; as pairs of reals they sum and travel the same.
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.resolve_neg().contiguous().view(-1)


def sum_into(out: Tensor, parts: Sequence[Tensor]) -> None:
    """Fill `out` with the sum of `parts`, added in their order; it may be one of them.

    All others but the first are left as they are. Halves are added up in float32, and rounded once.
    """
    if out.dtype in (torch.bfloat16, torch.float16):
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        out.copy_(total)
    elif len(parts) == 1:
        out.copy_(parts[0])
    else:
        total = parts[0]
        for part in parts[1:-1]:
            total = total.add_(part)
        # The last addition writes to `out`, which saves a pass to copy the sum.
        torch.add(total, parts[-1], out=out)


def unflatten(flat: Tensor, like: Tensor) -> Tensor:
    """Return a view of the numbers in the shape and dtype of `like`: the inverse of `flatten`."""
    if like.is_complex():
        return torch.view_as_complex(flat.view(-1, 2)).view(like.shape)
    return flat.view(like.shape)


# ------------------------------------------------------------------ BaseGroup


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Return when the result is there. Raises `PeerLost` when it will never be."""
        ...


@dataclass(slots=True)
class ChainedWork:
    """A collective, if any, and a function to call once after it."""

    before: Work | None = None
    after: Callable[[], object] | None = None

    def wait(self) -> None:
        """Wait for `before`, then do `after`, once."""
        if self.before is not None:
            self.before.wait()
        if self.after is not None:
            self.after()
        self.before = self.after = None


class SeveralWorks:
    """Works of a transport that are waited for as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self, *timeout: Any) -> None:
        """Wait for each; `timeout` is for those of torch's process groups."""
        for work in self._works:
            work.wait(*timeout)


class BaseGroup(Group):
    """A `Group` over torch tensors of any shape, strides and dtype, complex ones included.

    Collectives that begin with `in_window=True` are the engine's own, which silence is not for.

    Args:
        transport: "gloo", "nccl", "hccl", or "threads" for the in-process one.
        device: where the transport takes its tensors from.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        generation: int = 0,
        transport: str,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(rank=rank, size=size, generation=generation, transport=transport)
        self.device = torch.device(device)
        self.store: object = None  # has to live as long as the group
        self.spec: GroupSpec | None = None  # of the rendezvous that formed it
        self.open_windows: WeakSet[Any] = WeakSet()  # `WindowState`s of this rank's accumulators
        # Of a job's model in shards, set by `fully_sharded.form_replicate_group`.
        self.shard_ranks: tuple[int, ...] = ()
        self.replicate_ranks: tuple[int, ...] = ()
        self.replicate_group: BaseGroup | None = None

    def transport_collectives(self) -> int | None:
        """Return the collectives by the transport's own count; None where it is no evidence of
        the job's: the transport keeps none, or `interrupt` has added to it.
        """
        return None

    def interrupt(self) -> None:
        """Interrupt the present wait of this rank and all later ones, as if every peer were lost.
        From any thread; not collective. Without support by the transport its timeout remains.
        """

    # ------------------------------------------------------------------ collectives

    def all_reduce_sum(self, tensor: Tensor) -> None:
        self.all_reduce_sum_async(tensor).wait()

    def all_reduce_sum_async(self, tensor: Tensor, *, in_window: bool = False) -> Work:
        """Start `all_reduce_sum`. The sum is in `tensor` after `wait()`; leave it alone till then.

        Collectives are matched in the order in which they are started.
        """
        sent = 2 * (self.size - 1) * tensor.nbytes
        self._admit("all_reduce_sum", sent, in_window=in_window)
        if self.size == 1:
            return ChainedWork()
        flat = flatten(tensor)
        work = self._start_sum(flat)
        if flat.data_ptr() == tensor.data_ptr():  # a view, so the sum arrives in the tensor
            return work
        return ChainedWork(work, lambda: tensor.detach().copy_(unflatten(flat, tensor)))

    def all_gather(
        self, tensor: Tensor, sizes: Sequence[int] | None = None, *, in_window: bool = False
    ) -> Tensor:
        sizes = self._leading_sizes(tensor.shape, sizes)
        out = tensor.new_empty((sum(sizes), *tensor.shape[1:]))
        self._admit("all_gather", (self.size - 1) * out.nbytes, in_window=in_window)
        if self.size == 1:
            return out.copy_(tensor)
        # Transports gather equal parts, so shorter ones travel padded to the longest.
        reals = math.prod(tensor.shape[1:]) * (2 if tensor.is_complex() else 1)
        own_part = flatten(tensor)
        if sizes[self.rank] < max(sizes):
            own_part = torch.cat(
                [own_part, own_part.new_zeros(max(sizes) * reals - own_part.numel())]
            )
        parts = [torch.empty_like(own_part) for _ in sizes]
        self._start_gather(parts, own_part).wait()
        target, start = flatten(out), 0  # a view: `out` is new, and contiguous
        for part, size in zip(parts, sizes, strict=True):
            count = size * reals
            target[start : start + count].copy_(part[:count])
            start += count
        return out

    def gather_in_place_async(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> Work:
        """Start to fill `tensor`, of which every rank has one piece, with all pieces.

        Args:
            tensor: flat, real and contiguous: R pieces, of which this rank's, the one of its
                number, holds what the others are to get. Leave it alone until `wait()`.
            sizes: of the pieces, where they are not equal.
        """
        self._admit("all_gather", (self.size - 1) * tensor.nbytes)
        if self.size == 1:
            return ChainedWork()
        if sizes is None:
            return self._start_gather_in_place(tensor, list(tensor.chunk(self.size)))
        return self._start_uneven_gather(tensor, list(tensor.split(list(sizes))))

    def reduce_scatter_sum_async(
        self,
        out: Tensor,
        tensor: Tensor,
        sizes: Sequence[int] | None = None,
        *,
        in_window: bool = False,
    ) -> Work:
        """Start to fill `out` with the sum over ranks of this rank's piece of their `tensor`.

        Args:
            out: one piece; it may be the one of this rank's number in `tensor` itself, and must be
                where `sizes` are given.
            tensor: flat, real and contiguous: R pieces, the q-th for rank q. Leave both alone
                until `wait()`; the rest of `tensor` is undefined then.
            sizes: of the pieces, where they are not equal.
        """
        sent = (self.size - 1) * tensor.nbytes
        self._admit("reduce_scatter_sum", sent, in_window=in_window)
        if self.size == 1:
            return ChainedWork(after=lambda: out.copy_(tensor))
        if sizes is None:
            return self._start_reduce_scatter(out, tensor)
        return self._start_uneven_reduce_scatter(list(tensor.split(list(sizes))))

    def all_to_all(self, received: Tensor, tensor: Tensor, *, counts: Sequence[int]) -> None:
        """Send to rank q the q-th piece of `tensor`; get every rank's piece for this rank.

        Args:
            received: flat, real and contiguous; is filled with the pieces in the order of ranks.
            tensor: likewise: R equal pieces, or empty on a rank that sends nothing.
            counts: how many numbers each of the R ranks sends here (0 for those that send nothing).
        """
        self._admit("all_to_all", (self.size - 1) * tensor.nbytes)
        if self.size == 1:
            received.copy_(tensor)
            return
        sent = [tensor.numel() // self.size] * self.size
        self._start_exchange(received, tensor, list(counts), sent).wait()

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        if not 0 <= source < self.size:
            raise ValueError(f"`source` must be a rank below {self.size}, but is {source}")
        self._admit("broadcast", (self.size - 1) * tensor.nbytes)
        if self.size == 1:
            return
        data = bytes_of(tensor)  # so the transport need not know the dtype
        self._start_broadcast(data, source).wait()
        if data.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(data.view(tensor.dtype).view(tensor.shape))

    def barrier(self) -> None:
        self._admit("barrier", 0)
        if self.size > 1:
            self._start_barrier().wait()

    # ------------------------------------------------------------------ the transport's part

    @abstractmethod
    def _start_sum(self, flat: Tensor) -> Work: ...
    @abstractmethod
    def _start_gather(self, parts: list[Tensor], flat: Tensor) -> Work: ...
    def _start_gather_in_place(self, tensor: Tensor, pieces: list[Tensor]) -> Work:
        """`pieces` are views of `tensor`; a transport may want the one or the other."""
        del tensor
        return self._start_gather(pieces, pieces[self.rank])

    def _start_uneven_gather(self, tensor: Tensor, pieces: list[Tensor]) -> Work:
        """A transport may do it with fewer calls."""
        del tensor
        # In the same order on all ranks, as transports match collectives by their order.
        roots = [(piece, root) for root, piece in enumerate(pieces) if piece.numel()]
        return SeveralWorks([self._start_broadcast(*each) for each in roots])

    @abstractmethod
    def _start_reduce_scatter(self, out: Tensor, tensor: Tensor) -> Work: ...
    def _start_uneven_reduce_scatter(self, pieces: list[Tensor]) -> Work:
        """The sum is for this rank's piece. A transport may do it with fewer bytes."""
        return SeveralWorks([self._start_sum(piece) for piece in pieces if piece.numel()])

    @abstractmethod
    def _start_exchange(
        self, received: Tensor, sent: Tensor, receive_counts: list[int], send_counts: list[int]
    ) -> Work: ...
    @abstractmethod
    def _start_broadcast(self, flat: Tensor, source: int) -> Work: ...
    @abstractmethod
    def _start_barrier(self) -> Work: ...


# ------------------------------------------------------------------ Helpers


def gather_texts(group: BaseGroup, text: str) -> list[str]:
    """Return every rank's text, in the order of ranks. Collective."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(group.device)
    # The lengths first: a gather of unequal parts needs them on all ranks.
    sizes: list[int] = group.all_gather(torch.tensor([len(data)], device=group.device)).tolist()
    parts = group.all_gather(data, sizes).cpu().split(sizes)
    return [bytes(part.tolist()).decode() for part in parts]


def gather_numbers(group: BaseGroup, numbers: Sequence[float]) -> list[list[float]]:
    """Return every rank's numbers (equally many on all), a row for each rank, as float64.
    Collective.
    """
    row = torch.tensor([list(numbers)], dtype=torch.float64, device=group.device)
    return group.all_gather(row).tolist()


def ranks_where(group: BaseGroup, holds: bool) -> list[int]:
    """Return the ranks that call this with True: the same list on all of them. Collective."""
    rows = gather_numbers(group, [float(holds)])
    return [rank for rank, row in enumerate(rows) if any(row)]


def broadcast_tensors(group: BaseGroup, tensors: Iterable[Tensor], source: int = 0) -> None:
    """Give all ranks rank `source`'s numbers. Collective."""
    for tensor in tensors:
        if tensor.numel():  # all ranks skip an empty one alike
            group.broadcast(tensor, source)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, flat: its own memory where it is contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def to_floats(numbers: Sequence[Any]) -> list[float]:
    """Return numbers, some of them tensors of one, with one transfer from each device."""
    values, on_device = list(numbers), dict[torch.device, list[int]]()
    for index, number in enumerate(numbers):
        if isinstance(number, Tensor) and not number.is_cpu:
            on_device.setdefault(number.device, []).append(index)
    for indices in on_device.values():
        # float64 holds all others exactly; a count above 2**53 is out of reach.
        stacked = torch.stack([values[n].reshape(()).to(torch.float64) for n in indices])
        for index, number in zip(indices, stacked.tolist(), strict=True):
            values[index] = number
    return list(map(float, values))
