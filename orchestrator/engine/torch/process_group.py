"""`TorchGroup`: a `Group` over a process group object of torch.distributed.

The object is used directly and never becomes torch's default group, so that a later generation can
be formed while it exists.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp, group, is_available, is_initialized

from orchestrator.engine.common.waiting import for_others
from orchestrator.engine.torch.group import BaseGroup, Work, sum_into
from orchestrator.errors import ConfigError, PeerLost
from orchestrator.rundir.program_link import WORLD as RUN_RANKS

_PATIENCE_S = 30.0  # what is kept is done: its thread only has to get a processor
_LOOK_EVERY_S = 0.001
_OURS = 3  # Python's count of a tensor without other references: the list, `t`, and the argument


class RetainedTensors:
    """Tensors that other threads than Python's may hold."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep these until no other thread holds them; drop earlier ones that are free.

        Args:
            tensors: views without other references in Python once this has returned.
        """
        self._tensors = [*_in_use(self._tensors), *tensors]

    def wait(self) -> None:
        """Return when no other thread holds any, or after half a minute."""
        until = time.monotonic() + _PATIENCE_S
        while self._tensors and time.monotonic() < until:
            self._tensors = _in_use(self._tensors)
            if self._tensors:
                time.sleep(_LOOK_EVERY_S)


def _in_use(tensors: list[Any]) -> list[Tensor]:
    """Return those with references besides this list. `_use_count` has no public name."""
    return [t for t in tensors if t._use_count() > 1 or sys.getrefcount(t) > _OURS]


GLOO_TENSORS = RetainedTensors()
atexit.register(GLOO_TENSORS.wait)


# ------------------------------------------------------------------ Collectives in flight


# What gloo and NCCL say when a peer is gone or silent. Anything else is a defect, left as it is.
_LOST = re.compile(
    r"reset by peer|closed by peer|broken pipe|connection (was )?(reset|closed|aborted|refused)|"
    r"timed? ?out|timeout caused pair closure|unhandled system error|remote process exited|"
    r"socket closed|communicator was aborted|connection terminated|no route to host",
    re.IGNORECASE,
)
_TAG = 0


def to_peer_lost(error: RuntimeError, operation: str, rank: int) -> PeerLost | None:
    """Return the `PeerLost` that a transport's error stands for; None when it is about something
    else.
    """
    text = str(error)
    if _LOST.search(text) is None:
        return None
    first_line = text.strip().splitlines()[0]
    return PeerLost(f"rank {rank} lost a peer during {operation}: {first_line}")


@dataclass(slots=True, eq=False)
class TransportWork:
    """A transport's work handle with our errors. Holds the tensors until it is done.

    Attributes:
        tensors: views without other references in Python.
        held: where they go when it is done; None when the transport has let go of them by then.
    """

    work: Any
    operation: str
    rank: int
    tensors: Sequence[Tensor]
    held: RetainedTensors | None

    def wait(self) -> None:
        if self.work is None:
            return
        try:
            with for_others(self.operation):
                self.work.wait()
        except RuntimeError as error:
            lost = to_peer_lost(error, self.operation, self.rank)
            if lost is None:
                raise
            raise lost from error
        self.work = None
        if self.held is not None:
            self.held.keep(self.tensors)
        self.tensors = ()


class PairwiseExchange:
    """Exchange of every rank's piece with every other, in place, for gloo.

    In turn d each rank sends to the d-th after it while it hears from the d-th before it, which
    keeps both directions of every link busy, and no link with more than one at a time. gloo's own
    all-to-all uses one direction after the other, and its all-gather copies the whole result.

    Args:
        group: gloo's, whose errors are for the caller to translate.
        into: a place for every rank's piece; the one of this rank is left alone.
        pieces: one for every rank. Empty ones do not travel: both ends know that they are.
        at_once: start all turns at once; otherwise `wait` starts the next.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        into: Sequence[Tensor],
        pieces: Sequence[Tensor],
        *,
        at_once: bool = False,
    ) -> None:
        self._group, self._rank, self._into, self._pieces = group, rank, into, pieces
        self._turn, self._at_once = 0, at_once
        self._under_way: list[Any] = []
        self._next()

    def wait(self) -> None:
        while self._under_way:
            for work in self._under_way:
                work.wait()
            self._next()
        self._into = self._pieces = ()

    def _next(self) -> None:
        size, self._under_way = len(self._pieces), []
        while self._turn < size - 1 and (self._at_once or not self._under_way):
            self._turn += 1
            to, source = (self._rank + self._turn) % size, (self._rank - self._turn) % size
            if self._into[source].numel():
                self._under_way.append(self._group.recv([self._into[source]], source, _TAG))
            if self._pieces[to].numel():
                self._under_way.append(self._group.send([self._pieces[to]], to, _TAG))


# ------------------------------------------------------------------ Reduce-scatter for gloo
# Gloo's own reduce-scatter sends as many bytes as an all-reduce and takes longer. Here each rank
# sends the others their pieces, (R-1)/R of the tensor, and adds up what it receives in rank order.
# Received pieces need extra memory, at most that of two tensors: a third exchange starts only when
# the oldest has been added up, and one more is always in flight.


AT_ONCE = 2

Exchange = Callable[[Sequence[Tensor], Sequence[Tensor]], Work]
"""Starts to fill the first tensors with all ranks' pieces for this one, of which its own is there.
The second are its pieces for all ranks."""


@dataclass(slots=True, eq=False)
class _Sum:
    """One reduce-scatter in flight. When it is done, its memory goes back to `rooms`."""

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
        sum_into(self.out, self.parts)
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
        needed = (self._size - 1) * mine.nbytes
        room = self._rooms.pop()
        if room.numel() < needed:
            room = torch.empty(needed, dtype=torch.uint8, device=tensor.device)
        parts = list(room[:needed].view(tensor.dtype).chunk(self._size - 1))
        parts.insert(self._rank, mine)
        under_way = _Sum(self._exchange(parts, pieces), parts, out, room, self._rooms)
        self._under_way.append(under_way)
        return under_way


# ------------------------------------------------------------------ TorchGroup


_RANKS = ("WORLD_SIZE", RUN_RANKS, "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
"""Variables in which launchers state how many processes they have started."""
_NEVER_SENT = 99  # a tag
_DIRECT_BYTES = 2**18  # below that, one call is quicker than many


class TorchGroup(BaseGroup):
    """Ranks in processes, over gloo, NCCL or HCCL.

    Args:
        process_group: a `torch.distributed` process group or one of its backends; None only for a
            group of one rank.
    """

    def __init__(
        self,
        process_group: Any,
        *,
        rank: int,
        size: int,
        generation: int = 0,
        transport: str,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(
            rank=rank, size=size, generation=generation, transport=transport, device=device
        )
        self._group = process_group
        self._sums = ExchangedSums(rank, size, self._start_segments)
        self._parts_of_one = 0  # what gloo counts of a collective of ours, beyond the one

    @classmethod
    def wrap(cls, process_group: Any, *, device: torch.device | str | None = None) -> TorchGroup:
        """Return a group over the caller's own, `torch.distributed.group.WORLD` say. Not
        collective.

        Args:
            process_group: formed by the caller, who also ends it.
            device: where tensors live; by default the current CUDA device under NCCL, else the CPU.

        Raises:
            ConfigError: it is no process group.
        """
        if not callable(getattr(process_group, "allreduce", None)):
            raise ConfigError(
                "TorchGroup.wrap() takes a process group of torch, as in TorchGroup.wrap("
                "torch.distributed.group.WORLD) after init_process_group(), of which this process "
                f"is a member; but was given {process_group!r:.60}"
            )
        backend = str(process_group.name()).lower()
        if device is None:
            device = torch.device("cuda") if "nccl" in backend else torch.device("cpu")
        return cls(
            process_group,
            rank=process_group.rank(),
            size=process_group.size(),
            transport=backend,
            device=device,
        )

    @classmethod
    def alone(
        cls, *, transport: str = "gloo", device: torch.device | str = "cpu", generation: int = 0
    ) -> TorchGroup:
        """Return the group of one rank: every collective returns at once, nothing is sent or
        counted.
        """
        return cls(None, rank=0, size=1, generation=generation, transport=transport, device=device)

    def transport_collectives(self) -> int | None:
        """Return the collectives since the group was formed, by the process group's own sequence
        number.
        """
        if self._group is None:
            return 0
        counted = int(self._group._get_sequence_number_for_group())
        return counted - self._parts_of_one

    def interrupt(self) -> None:
        """By a time-out on purpose: gloo closes all its connections at the first, and has no other
        way to end a wait from outside. One peer that lives is enough.
        """
        for peer in range(self.size) if self.transport == "gloo" and self.size > 1 else ():
            try:
                if peer != self.rank:
                    nothing = [torch.empty(1)]
                    self._group.recv(nothing, peer, _NEVER_SENT).wait(timedelta(milliseconds=1))
            except RuntimeError as error:  # this one, or what was wrong with that peer already
                if "Timed out" in str(error):
                    return

    def _start(self, operation: str, call: Callable[..., Any], *tensors: Tensor) -> Work:
        views = [tensor.detach() for tensor in tensors]  # of this call's own: see `held`
        try:
            work = call(*views)
        except RuntimeError as error:
            lost = to_peer_lost(error, operation, self.rank)
            if lost is None:
                raise
            raise lost from error
        return TransportWork(
            work, operation, self.rank, views, GLOO_TENSORS if self.transport == "gloo" else None
        )

    def _start_sum(self, flat: Tensor) -> Work:
        return self._start(
            "all_reduce_sum", lambda mine: self._group.allreduce([mine], ReduceOp.SUM), flat
        )

    def _start_gather(self, parts: list[Tensor], flat: Tensor) -> Work:
        # Equally large on all ranks, so all choose alike.
        if self.transport == "gloo" and flat.nbytes >= _DIRECT_BYTES:
            if parts[self.rank].data_ptr() != flat.data_ptr():
                parts[self.rank].copy_(flat)
            return self._start_pairwise("all_gather", parts, [flat] * self.size)
        return self._start(
            "all_gather",
            lambda mine, *all_parts: self._group.allgather([list(all_parts)], [mine]),
            flat,
            *parts,
        )

    def _start_gather_in_place(self, tensor: Tensor, pieces: list[Tensor]) -> Work:
        mine = pieces[self.rank]
        if self.transport == "gloo":
            return self._start_gather(pieces, mine)
        return self._start("all_gather", self._group._allgather_base, tensor, mine)

    def _start_reduce_scatter(self, out: Tensor, tensor: Tensor) -> Work:
        if self.transport == "gloo":
            return self._sums.start(out, tensor)
        return self._start("reduce_scatter_sum", self._group._reduce_scatter_base, out, tensor)

    def _start_segments(self, into: Sequence[Tensor], pieces: Sequence[Tensor]) -> Work:
        return self._start_pairwise("reduce_scatter_sum", into, pieces, at_once=True)

    def _start_pairwise(
        self,
        operation: str,
        into: Sequence[Tensor],
        pieces: Sequence[Tensor],
        *,
        at_once: bool = False,
    ) -> Work:
        travel = [
            tensor
            for rank, both in enumerate(zip(into, pieces, strict=True))
            for tensor in both
            if rank != self.rank and tensor.numel()
        ]
        self._parts_of_one += len(travel) - 1
        return self._start(
            operation,
            lambda: PairwiseExchange(self._group, self.rank, into, pieces, at_once=at_once),
        )

    def _start_exchange(
        self, received: Tensor, sent: Tensor, receive_counts: list[int], send_counts: list[int]
    ) -> Work:
        if self.transport == "gloo":
            into, pieces = received.split(receive_counts), sent.split(send_counts)
            into[self.rank].copy_(pieces[self.rank])
            return self._start_pairwise("all_to_all", into, pieces)
        return self._start(
            "all_to_all",
            lambda *both: self._group.alltoall_base(*both, receive_counts, send_counts),
            received,
            sent,
        )

    def _start_broadcast(self, flat: Tensor, source: int) -> Work:
        return self._start("broadcast", lambda mine: self._group.broadcast(mine, source), flat)

    def _start_barrier(self) -> Work:
        return self._start("barrier", self._group.barrier)


def group_of_torch(device: torch.device | str = "cpu") -> TorchGroup:
    """Return the ranks of `init_process_group()`; this process alone where there is but one.

    Raises:
        ConfigError: a launcher has started more processes than this, and they have not met.
    """
    if is_available() and is_initialized():
        return TorchGroup.wrap(group.WORLD)
    for name in _RANKS:
        if (ranks := os.environ.get(name, "")).isdecimal() and int(ranks) > 1:
            raise ConfigError(
                f"{name}={ranks}, but torch.distributed.init_process_group() was not called, so "
                f"each of the {ranks} ranks would train alone: call it before the Accumulator is "
                "built, or give it TorchGroup.alone() if that is meant"
            )
    return TorchGroup.alone(device=device)


def keep_forever(process_group: Any) -> None:
    """Leave `process_group` to the end of the process.

    Destroying a gloo group blocks until the time-out of its pending operations, on every rank that
    was not a neighbour of the one that died; a rank that lost its peers has to end at once.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))
