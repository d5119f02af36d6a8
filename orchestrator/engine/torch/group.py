"""`TorchGroup`: a `Group` over a process group object of torch.distributed.

The object is used directly and is never made the framework's global default group, so that a later
generation can be formed beside it.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from orchestrator.engine.torch.base_group import BaseGroup, Work
from orchestrator.engine.torch.exchanged import ExchangedSums
from orchestrator.engine.torch.flat import bytes_of
from orchestrator.engine.torch.held import BY_GLOO, Held
from orchestrator.errors import PeerLost

# What gloo and NCCL say when a peer is gone or silent. Anything else is a defect, left as it is.
_LOST = re.compile(
    r"reset by peer|closed by peer|broken pipe|connection (was )?(reset|closed|aborted|refused)|"
    r"timed? ?out|timeout caused pair closure|unhandled system error|remote process exited|"
    r"socket closed|communicator was aborted|connection terminated|no route to host",
    re.IGNORECASE,
)


_DIRECT_BYTES = 2**18  # below that, one call is quicker than many
_TAG = 0


def as_peer_lost(error: RuntimeError, operation: str, rank: int) -> PeerLost | None:
    """The `PeerLost` that a transport's error stands for; None when it is about something else."""
    text = str(error)
    if _LOST.search(text) is None:
        return None
    first_line = text.strip().splitlines()[0]
    return PeerLost(f"rank {rank} lost a peer during {operation}: {first_line}")


class _Started:
    """A transport's work handle whose errors are ours. Holds the tensors until it is done.

    Args:
        tensors: views that nobody else in Python has.
        held: where they go when it is done; None when the transport has let go of them by then.
    """

    def __init__(
        self, work: Any, operation: str, rank: int, tensors: Sequence[Tensor], held: Held | None
    ) -> None:
        self._work, self._operation, self._rank, self._tensors = work, operation, rank, tensors
        self._held = held

    def wait(self) -> None:
        if self._work is None:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            lost = as_peer_lost(error, self._operation, self._rank)
            if lost is None:
                raise
            raise lost from error
        self._work = None
        if self._held is not None:
            self._held.keep(self._tensors)
        self._tensors = ()


class _Pairwise:
    """Every rank's piece to every other, into place, for gloo.

    In turn d each rank sends to the d-th after it while it hears from the d-th before it, which
    keeps both directions of every link busy, and no link with more than one at a time. gloo's own
    all-to-all uses one direction after the other, and its all-gather copies the whole result.

    Args:
        group: gloo's, whose errors are for the caller to translate.
        into: a place for every rank's piece; the one of this rank is left alone.
        pieces: one for every rank. Empty ones do not travel: both ends know that they are.
        at_once: take all turns at once: while nobody waits, a next one would not begin.
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


class TorchGroup(BaseGroup):
    """Ranks in processes, over gloo, NCCL or HCCL.

    Args:
        process_group: a `torch.distributed` process group or one of its backends; None only for a
            group of one rank.
        keep: whatever has to live as long as the group (its store).
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
        keep: tuple[Any, ...] = (),
    ) -> None:
        super().__init__(
            rank=rank, size=size, generation=generation, transport=transport, device=device
        )
        self._group, self._keep = process_group, keep
        self._sums = ExchangedSums(rank, size, self._start_segments)
        self._parts_of_one = 0  # what gloo counts of a collective of ours, beyond the one

    @classmethod
    def wrap(cls, process_group: Any, *, device: torch.device | str | None = None) -> TorchGroup:
        """A group over the caller's own, `torch.distributed.group.WORLD` say. Not collective.

        Args:
            process_group: formed by the caller, who also ends it.
            device: where tensors live; by default the current CUDA device under NCCL, else the CPU.
        """
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
        """The group of one rank: every collective returns at once, nothing is sent or counted."""
        return cls(None, rank=0, size=1, generation=generation, transport=transport, device=device)

    def transport_collectives(self) -> int | None:
        """Collectives since the group was formed, by the process group's own sequence number."""
        if self._group is None:
            return 0
        counted = int(self._group._get_sequence_number_for_group())  # noqa: SLF001  # no public name
        return counted - self._parts_of_one

    def _start(self, operation: str, call: Callable[..., Any], *tensors: Tensor) -> Work:
        views = [tensor.detach() for tensor in tensors]  # of this call's own: see `held`
        try:
            work = call(*views)
        except RuntimeError as error:
            lost = as_peer_lost(error, operation, self.rank)
            if lost is None:
                raise
            raise lost from error
        return _Started(
            work, operation, self.rank, views, BY_GLOO if self.transport == "gloo" else None
        )

    def _start_sum(self, flat: Tensor) -> Work:
        return self._start(
            "all_reduce_sum", lambda mine: self._group.allreduce([mine], ReduceOp.SUM), flat
        )

    def _start_gather(self, parts: list[Tensor], flat: Tensor) -> Work:
        # Equally large on all ranks, so all choose alike.
        if self.transport == "gloo" and bytes_of(flat) >= _DIRECT_BYTES:
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
        return self._start("all_gather", self._group._allgather_base, tensor, mine)  # noqa: SLF001  # no public name

    def _start_reduce_scatter(self, out: Tensor, tensor: Tensor) -> Work:
        if self.transport == "gloo":
            return self._sums.start(out, tensor)
        return self._start("reduce_scatter_sum", self._group._reduce_scatter_base, out, tensor)  # noqa: SLF001  # no public name

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
            lambda: _Pairwise(self._group, self.rank, into, pieces, at_once=at_once),
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


def never_destroy(process_group: Any) -> None:
    """Leave `process_group` to the end of the process.

    Destroying a gloo group blocks until the time-out of its pending operations, on every rank that
    was not a neighbour of the one that died; a rank that lost its peers has to end at once.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))
