"""What all of this package's groups share: counting, silence, odd shapes and types, the lone rank.

A transport adds six raw operations on contiguous real tensors (the methods with an underscore).
With one rank none of them is called, and nothing is counted, since nothing is sent.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from orchestrator.engine.common.place_in_group import Member, checked_sizes
from orchestrator.engine.torch.comm.tensors import bytes_of, flat_of, reals_of, shaped


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return when the result is there. Raises `PeerLost` when it will never be."""
        ...


@dataclass(slots=True)
class Done:
    """A collective that needed no wait, or one that has something left to do after it."""

    before: Work | None = None
    after: Callable[[], object] | None = None

    def wait(self) -> None:
        """Wait for `before`, then do `after`, once."""
        if self.before is not None:
            self.before.wait()
        if self.after is not None:
            self.after()
        self.before = self.after = None


class BaseGroup(Member, ABC):
    """A `Group` over torch tensors of any shape, strides and dtype, complex ones included.

    Args:
        rank, size, generation: see `Member`.
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
        self._device = torch.device(device)
        self.kept: object = None  # what has to live as long as the group: its store
        self.node = "this node"  # until somebody says its name

    @property
    def device(self) -> torch.device:
        """Where tensors handed to the transport have to live."""
        return self._device

    def transport_collectives(self) -> int | None:
        """Collectives by the transport's own count, or None when it keeps none."""
        return None

    def interrupt(self) -> None:
        """End what this rank waits for, and all that it would wait for later, as if every peer were
        lost. From any thread; not collective. What no transport can do is left to its time-out.
        """

    def close(self) -> None:
        """The last of it on this rank: what follows is an end, not a loss. Every rank calls it."""

    # ------------------------------------------------------------------ collectives

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over ranks, in place. Same shape and dtype on all ranks."""
        self.all_reduce_sum_async(tensor).wait()

    def all_reduce_sum_async(self, tensor: Tensor) -> Work:
        """Start `all_reduce_sum`. The sum is in `tensor` after `wait()`; leave it alone till then.

        Collectives are matched in the order in which they are started.
        """
        self.silence.check("all_reduce_sum")
        if self._size == 1:
            return Done()
        flat = flat_of(tensor)
        self._count(bytes_of(tensor), 2 * (self._size - 1) * bytes_of(tensor))
        work = self._start_sum(flat)
        if flat.data_ptr() == tensor.data_ptr():
            return work
        return Done(work, lambda: tensor.copy_(shaped(flat, tensor)))

    def all_gather(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Concatenate the ranks' tensors along axis 0.

        Args:
            tensor: shape (n_r, ...); n_r may differ between ranks when `sizes` is given.
            sizes: the R leading sizes n_0..n_{R-1}, equal on all ranks; None when all are equal.

        Returns:
            A new tensor of shape (sum of sizes, ...), the same on all ranks.

        Raises:
            ValueError: `tensor` has no axis 0, or is not of the size that `sizes` says.
        """
        self.silence.check("all_gather")
        sizes = checked_sizes(tensor.shape, sizes, self._rank, self._size)
        if self._size == 1:
            return tensor.clone(memory_format=torch.contiguous_format)
        row = math.prod(tensor.shape[1:])
        out = tensor.new_empty((sum(sizes), *tensor.shape[1:]))
        self._count(bytes_of(tensor), (self._size - 1) * bytes_of(out))
        # Transports gather equal parts, so shorter ones travel padded to the longest.
        longest = max(sizes) * row
        mine = flat_of(tensor)
        if sizes[self._rank] < max(sizes):
            mine = torch.cat([mine, mine.new_zeros((longest * reals_of(tensor)) - mine.numel())])
        parts = [torch.empty_like(mine) for _ in sizes]
        self._start_gather(parts, mine).wait()
        target, place = flat_of(out), 0
        for part, size in zip(parts, sizes, strict=True):
            count = size * row * reals_of(tensor)
            target[place : place + count].copy_(part[:count])
            place += count
        return out

    def gather_into(self, parts: Sequence[Tensor], tensor: Tensor) -> None:
        """Fill `parts[q]` with rank q's `tensor`; all contiguous, real, of one size. No copies."""
        self.silence.check("all_gather")
        if self._size == 1:
            parts[0].copy_(tensor)
            return
        self._count(bytes_of(tensor), (self._size - 1) * self._size * bytes_of(tensor))
        self._start_gather(list(parts), tensor).wait()

    def gather_in_place_async(self, tensor: Tensor) -> Work:
        """Start to fill `tensor`, of which every rank has one piece, with everybody's pieces.

        Args:
            tensor: flat, real and contiguous: R equal pieces, of which this rank's, the one of its
                number, holds what the others are to get. Leave it alone until `wait()`.
        """
        self.silence.check("all_gather")
        if self._size == 1:
            return Done()
        pieces = list(tensor.chunk(self._size))
        self._count(bytes_of(pieces[self._rank]), (self._size - 1) * bytes_of(tensor))
        return self._start_gather_in_place(tensor, pieces)

    def reduce_scatter_sum_async(self, out: Tensor, tensor: Tensor) -> Work:
        """Start to fill `out` with the sum over ranks of this rank's piece of their `tensor`.

        Args:
            out: one piece; it may be the one of this rank's number in `tensor` itself.
            tensor: flat, real and contiguous: R equal pieces, the q-th for rank q. Leave both alone
                until `wait()`; what `tensor` holds then, outside of `out`, is not said.
        """
        self.silence.check("reduce_scatter_sum")
        if self._size == 1:
            return Done(after=lambda: out.copy_(tensor))
        self._count(bytes_of(tensor), (self._size - 1) * bytes_of(tensor))
        return self._start_reduce_scatter(out, tensor)

    def all_to_all(self, received: Tensor, tensor: Tensor, *, counts: Sequence[int]) -> None:
        """Send to rank q the q-th piece of `tensor`; get every rank's piece for this rank.

        Args:
            received: flat, real and contiguous; is filled with the pieces in the order of ranks.
            tensor: likewise: R equal pieces, or empty on a rank that sends nothing.
            counts: how many numbers each of the R ranks sends here (0 for those that send nothing).
        """
        self.silence.check("all_to_all")
        if self._size == 1:
            received.copy_(tensor)
            return
        self._count(bytes_of(tensor), (self._size - 1) * bytes_of(tensor))
        sent = [tensor.numel() // self._size] * self._size
        self._start_exchange(received, tensor, list(counts), sent).wait()

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Replace `tensor` by rank `source`'s, in place. Same shape and dtype on all ranks."""
        self.silence.check("broadcast")
        if not 0 <= source < self._size:
            raise ValueError(f"`source` must be a rank below {self._size}, but is {source}")
        if self._size == 1:
            return
        flat = flat_of(tensor)
        self._count(bytes_of(tensor), (self._size - 1) * bytes_of(tensor))
        self._start_broadcast(flat, source).wait()
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(shaped(flat, tensor))

    def barrier(self) -> None:
        """Return once every rank has called."""
        self.silence.check("barrier")
        if self._size > 1:
            self._counters.collectives += 1
            self._start_barrier().wait()

    # ------------------------------------------------------------------ the transport's part

    @abstractmethod
    def _start_sum(self, flat: Tensor) -> Work: ...
    @abstractmethod
    def _start_gather(self, parts: list[Tensor], flat: Tensor) -> Work: ...
    def _start_gather_in_place(self, tensor: Tensor, pieces: list[Tensor]) -> Work:
        """`pieces` are views of `tensor`; a transport may want the one or the other."""
        del tensor
        return self._start_gather(pieces, pieces[self._rank])

    @abstractmethod
    def _start_reduce_scatter(self, out: Tensor, tensor: Tensor) -> Work: ...
    @abstractmethod
    def _start_exchange(
        self, received: Tensor, sent: Tensor, receive_counts: list[int], send_counts: list[int]
    ) -> Work: ...
    @abstractmethod
    def _start_broadcast(self, flat: Tensor, source: int) -> Work: ...
    @abstractmethod
    def _start_barrier(self) -> Work: ...
