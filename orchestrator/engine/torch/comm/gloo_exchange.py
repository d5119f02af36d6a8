"""A reduce-scatter from an exchange of pieces and additions, for gloo.

Gloo's own sends as many bytes as a whole all-reduce does, and takes longer than one. Here each rank
sends the others their pieces, (R-1)/R of the tensor, and adds up what it gets in the order of the
ranks. What it gets needs memory beside the gradient: at most that of two tensors, since a third
exchange starts only when the oldest has been added up. There is one more on its way then, so the
network does not stand still for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from orchestrator.engine.torch.comm.base_group import Work
from orchestrator.engine.torch.comm.tensors import add_up, bytes_of

AT_ONCE = 2

Exchange = Callable[[Sequence[Tensor], Sequence[Tensor]], Work]
"""Starts to fill the first tensors with all ranks' pieces for this one, of which its own is there.
The second are its pieces for all ranks."""


@dataclass(slots=True, eq=False)
class _Sum:
    """One under way. When it is done, its room goes back to `rooms`."""

    exchange: Work
    parts: Sequence[Tensor]
    out: Tensor
    room: Tensor
    rooms: list[Tensor]
    done: bool = False

    def wait(self) -> None:
        if self.done:
            return
        self.exchange.wait()
        add_up(self.out, self.parts)
        self.rooms.append(self.room)
        self.done = True


class ExchangedSums:
    """One group's reduce-scatters. The memory of two exchanges is kept from one to the next.

    Args:
        rank, size: this rank, and how many there are.
        exchange: how pieces travel.
    """

    def __init__(self, rank: int, size: int, exchange: Exchange) -> None:
        self._rank, self._size, self._exchange = rank, size, exchange
        self._rooms = [torch.empty(0, dtype=torch.uint8) for _ in range(AT_ONCE)]
        self._under_way: deque[_Sum] = deque()

    def start(self, out: Tensor, tensor: Tensor) -> Work:
        """See `BaseGroup.reduce_scatter_sum_async`. May wait for an earlier one."""
        while self._under_way and (not self._rooms or self._under_way[0].done):
            self._under_way.popleft().wait()
        pieces = tensor.chunk(self._size)
        mine = pieces[self._rank]
        needed = (self._size - 1) * bytes_of(mine)
        room = self._rooms.pop()
        if room.numel() < needed:
            room = torch.empty(needed, dtype=torch.uint8, device=tensor.device)
        parts = list(room[:needed].view(tensor.dtype).chunk(self._size - 1))
        parts.insert(self._rank, mine)
        under_way = _Sum(self._exchange(parts, pieces), parts, out, room, self._rooms)
        self._under_way.append(under_way)
        return under_way
