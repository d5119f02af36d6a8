"""`TorchGroup`: a `Group` over a process group object of torch.distributed.

The object is used directly and is never made the framework's global default group, so that a later
generation can be formed beside it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp, group, is_available, is_initialized

from orchestrator.engine.torch.comm.base_group import BaseGroup, Work
from orchestrator.engine.torch.comm.gloo_exchange import ExchangedSums
from orchestrator.engine.torch.comm.held_by_gloo import BY_GLOO
from orchestrator.engine.torch.comm.running_collectives import Pairwise, Started, as_peer_lost
from orchestrator.engine.torch.comm.tensors import bytes_of
from orchestrator.errors import ConfigError
from orchestrator.inside.variables import WORLD as RUN_RANKS

_RANKS = ("WORLD_SIZE", RUN_RANKS, "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
"""Where launchers say how many processes they have started."""
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
        """A group over the caller's own, `torch.distributed.group.WORLD` say. Not collective.

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
        """The group of one rank: every collective returns at once, nothing is sent or counted."""
        return cls(None, rank=0, size=1, generation=generation, transport=transport, device=device)

    def transport_collectives(self) -> int | None:
        """Collectives since the group was formed, by the process group's own sequence number."""
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
            lost = as_peer_lost(error, operation, self.rank)
            if lost is None:
                raise
            raise lost from error
        return Started(
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
            lambda: Pairwise(self._group, self.rank, into, pieces, at_once=at_once),
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
    """The ranks of `init_process_group()`; this process alone where there is but one.

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


def never_destroy(process_group: Any) -> None:
    """Leave `process_group` to the end of the process.

    Destroying a gloo group blocks until the time-out of its pending operations, on every rank that
    was not a neighbour of the one that died; a rank that lost its peers has to end at once.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))
