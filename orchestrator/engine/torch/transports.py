"""Process groups of torch.distributed as groups, and the choice of their transport.

A process group object is used directly and never becomes torch's default group, so that a later
generation can be formed while it exists. Rank 0 chooses the transport, from what every rank
reports, so all ranks use the same. A transport that was requested by name and is not available is
refused; there is no fallback.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from orchestrator.engine.api import GroupSpec
from orchestrator.engine.common.waiting import for_others, hccl_exec_timeout
from orchestrator.engine.torch.group import (
    BaseGroup,
    ChainedWork,
    SeveralWorks,
    Work,
    sum_into,
)
from orchestrator.errors import PEER_LOST, ConfigError, PeerLost, TransportError
from orchestrator.plugins import TRANSPORTS
from orchestrator.rundir.program_link import WORLD as RUN_RANKS

# ------------------------------------------------------------------ Tensors that gloo holds


_POLL_S = 0.001

_kept_for_gloo: list[Tensor] = []
"""Views without other references in Python, until gloo's threads have let go of them."""


def _in_use(tensors: list[Any]) -> list[Tensor]:
    """Return those with references besides this list. `_use_count` has no public name."""
    # Python counts three without others: the list, `t`, and the argument of getrefcount.
    return [t for t in tensors if t._use_count() > 1 or sys.getrefcount(t) > 3]


@atexit.register
def _wait_for_gloo() -> None:
    """Return when no other thread holds any, or after half a minute."""
    until = time.monotonic() + 30.0  # their operations are done: threads only need a processor
    while time.monotonic() < until:
        _kept_for_gloo[:] = _in_use(_kept_for_gloo)
        if not _kept_for_gloo:
            return
        time.sleep(_POLL_S)


# ------------------------------------------------------------------ Collectives in flight


# What gloo and NCCL say when a peer is gone or silent: in a collective, any timeout or broken
# connection is due to a peer. Anything else is a defect, left as it is.
_LOST = re.compile(
    rf"{PEER_LOST.pattern}|(reset|closed) by peer|no route to host|"
    r"connection (was )?(reset|closed|aborted|refused|terminated)|"
    r"time[sd]? ?out|timing out|unhandled system error|communicator was aborted",
    re.IGNORECASE,
)
_windows_of: dict[int, WeakSet[Any]] = {}
"""Open windows of all groups that wrap the same process group, by its `id`."""


@contextmanager
def peer_lost_during(operation: str, rank: int) -> Generator[None]:
    """Raise `PeerLost` in the place of a transport's error that is about a peer."""
    try:
        yield
    except RuntimeError as error:
        if _LOST.search(str(error)) is None:
            raise
        first_line = str(error).strip().splitlines()[0]
        raise PeerLost(f"rank {rank} lost a peer during {operation}: {first_line}") from error


@dataclass(slots=True, eq=False)
class TransportWork:
    """A transport's work handle with our errors. Holds the tensors until it is done.

    Attributes:
        tensors: views without other references in Python. gloo's threads may hold them a little
            longer.
    """

    work: Any
    operation: str
    group: TorchGroup
    tensors: Sequence[Tensor]

    def wait(self) -> None:
        if self.work is None:
            return
        group = self.group
        try:
            with peer_lost_during(self.operation, group.rank), for_others(self.operation):
                self.work.wait(*(() if group.wait_timeout is None else (group.wait_timeout,)))
        except PeerLost:
            # Its watchdog would end the process a minute later, however long saving takes.
            if group.transport == "nccl":
                group.interrupt()
            raise
        if group.aborted:
            raise group.aborted_error(self.operation)
        self.work = None
        if group.transport == "gloo":
            _kept_for_gloo[:] = [*_in_use(_kept_for_gloo), *self.tensors]
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
        at_once: start all turns at once; otherwise only the first, and `wait` the others.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        into: Sequence[Tensor],
        pieces: Sequence[Tensor],
        *,
        at_once: bool,
    ) -> None:
        self._turns = self._start_turns(group, rank, into, pieces)
        self._started = list(self._turns) if at_once else [next(self._turns, [])]

    @staticmethod
    def _start_turns(
        group: Any, rank: int, into: Sequence[Tensor], pieces: Sequence[Tensor]
    ) -> Iterator[list[Any]]:
        """Start a turn each time that the next one is asked for; yield what it waits for."""
        size, tag = len(pieces), 0
        for turn in range(1, size):
            to, source = (rank + turn) % size, (rank - turn) % size
            works: list[Any] = []
            if into[source].numel():
                works.append(group.recv([into[source]], source, tag))
            if pieces[to].numel():
                works.append(group.send([pieces[to]], to, tag))
            yield works

    def wait(self) -> None:
        for works in chain(self._started, self._turns):
            for work in works:
                work.wait()
        self._started = []


# ------------------------------------------------------------------ TorchGroup


_DEVICE_BACKENDS = ("nccl", "hccl")
"""Backends whose waits block a stream of the device, and not the thread."""


class TorchGroup(BaseGroup):
    """Ranks in processes, over gloo, NCCL or HCCL.

    Args:
        process_group: a `torch.distributed` process group or one of its backends; None only for a
            group of one rank.
        wait_timeout_s: for transports whose `wait()` blocks a stream of the device only. With a
            time-out NCCL blocks this thread too, aborts the communicator when the time is up, and
            raises here. Without one its watchdog would end the process with SIGABRT, on every rank
            that only waited.
    """

    def __init__(
        self, process_group: Any, *, wait_timeout_s: float | None = None, **base: Any
    ) -> None:
        super().__init__(**base)
        self._group = process_group
        self.wait_timeout = None if wait_timeout_s is None else timedelta(seconds=wait_timeout_s)
        self.aborted = False
        self.interrupted = False  # gloo counts the receive that interrupts it as a collective
        # Of gloo's sums that may be under way, two at a time.
        self._memory = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._summing: deque[ChainedWork] = deque()
        self._parts_of_one = 0  # what gloo counts of a collective of ours, beyond the one

    @classmethod
    def wrap(cls, process_group: Any, *, device: torch.device | str | None = None) -> TorchGroup:
        """Return a group over the caller's own, `torch.distributed.group.WORLD` say. Not
        collective.

        Args:
            process_group: formed by the caller, who also ends it.
            device: where tensors live, the model's say; by default the one that the group is bound
                to (`init_process_group(device_id=...)`), else the current one. Of a group with
                several backends (`init_process_group()` on GPUs) it chooses one. With gloo always
                the CPU: it reduces tensors of GPUs as well, but what ranks agree on stays there.

        Raises:
            ConfigError: it is no process group.
        """
        if not callable(getattr(process_group, "allreduce", None)):
            raise ConfigError(
                "TorchGroup.wrap() takes a process group of torch, as in TorchGroup.wrap("
                "torch.distributed.group.WORLD) after init_process_group(), of which this process "
                f"is a member; but was given {process_group!r:.60}"
            )
        if device is None:
            device = getattr(process_group, "bound_device_id", None)
        if device is None and torch.accelerator.is_available():
            device = torch.device(torch.accelerator.current_device_index())
        device = torch.device(device or "cpu")
        backend = process_group
        with suppress(AttributeError, RuntimeError):  # a backend, or an unknown device
            backend = process_group._get_backend(device)
        transport = str(backend.name()).lower()
        if transport == "gloo":
            device = torch.device("cpu")
        wait_timeout_s = None
        if transport in _DEVICE_BACKENDS:
            # Shortly before its watchdog would end the process. Plug-ins may not say when.
            timeout = getattr(getattr(backend, "options", None), "_timeout", None)
            wait_timeout_s = None if timeout is None else 0.9 * timeout.total_seconds()
        group = cls(
            backend,
            rank=process_group.rank(),
            size=process_group.size(),
            transport=transport,
            device=device,
            wait_timeout_s=wait_timeout_s,
        )
        group.open_windows = _windows_of.setdefault(id(process_group), group.open_windows)
        return group

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
        number; None once the group is interrupted. Other backends than these keep none, or not of
        all calls.
        """
        if self._group is None:
            return 0
        if self.transport not in ("gloo", "nccl"):
            return None
        counted = int(self._group._get_sequence_number_for_group())
        # Read after the count: another thread sets it before the receive that it is about.
        return None if self.interrupted else counted - self._parts_of_one

    def interrupt(self) -> None:
        """NCCL's kernels end when the communicator is aborted. gloo has no way to end a wait from
        outside, but closes all its connections at the first time-out, which is made here on
        purpose; one peer that lives is enough.
        """
        self.interrupted = True
        if self.replicate_group is not None:  # the main thread may wait there
            self.replicate_group.interrupt()
        if self.transport == "nccl" and self._group is not None:
            self.aborted = True  # before: a wait that the abort ends returns without a result
            self._group.abort()
        group: Any = self._group
        for peer in range(self.size) if self.transport == "gloo" and self.size > 1 else ():
            try:
                if peer != self.rank:
                    nothing = [torch.empty(1)]  # is never sent with this tag
                    group.recv(nothing, peer, 99).wait(timedelta(milliseconds=1))
            except RuntimeError as error:  # this one, or what was wrong with that peer already
                if "Timed out" in str(error):
                    return

    def close(self) -> None:
        """Wait until the devices of all ranks are done, of NCCL and HCCL: another one may still
        read this one's memory, and rank 0 hosts the store, which this uses.
        """
        store: Any = self.store
        if self.transport not in _DEVICE_BACKENDS or store is None or self.aborted:
            return
        torch.accelerator.synchronize(self.device)
        try:
            store.count("left", 1)
            until = time.monotonic() + 10.0
            while store.count("left") < self.size and time.monotonic() < until:
                time.sleep(_POLL_S)
        except dist.DistError:
            return  # rank 0 has seen all others, and is gone

    def aborted_error(self, operation: str) -> PeerLost:
        """Return the error of an operation on an aborted group, whose results are invalid."""
        return PeerLost(f"rank {self.rank} lost a peer during {operation}: it was broken off")

    def _start(self, operation: str, call: Callable[[list[Tensor]], Any], *tensors: Tensor) -> Work:
        if self.aborted:
            raise self.aborted_error(operation)
        views = list(map(Tensor.detach, tensors))  # of this call's own: see `TransportWork`
        with peer_lost_during(operation, self.rank):
            work = call(views)
        return TransportWork(work, operation, self, views)

    def _start_sum(self, flat: Tensor) -> Work:
        return self._start("all_reduce_sum", self._group.allreduce, flat)  # sums by default

    def _start_gather(self, parts: list[Tensor], flat: Tensor) -> Work:
        # Equally large on all ranks, so all choose alike: for few bytes one call is quicker.
        if self._sends_directly(flat) and flat.nbytes >= 2**18:
            # An exchange fills the parts of the others alone.
            if parts[self.rank].data_ptr() != flat.data_ptr():
                parts[self.rank].copy_(flat)
            return self._start_pairwise("all_gather", parts, [flat] * self.size)
        return self._start(
            "all_gather",
            lambda views: self._group.allgather([views[1:]], views[:1]),
            flat,
            *parts,
        )

    def _start_gather_in_place(self, tensor: Tensor, pieces: list[Tensor]) -> Work:
        own_piece = pieces[self.rank]
        if self.transport == "gloo":
            return self._start_gather(pieces, own_piece)
        return self._start(
            "all_gather", lambda both: self._group._allgather_base(*both), tensor, own_piece
        )

    def _start_uneven_gather(self, tensor: Tensor, pieces: list[Tensor]) -> Work:
        if self._sends_directly(tensor):
            own_piece = pieces[self.rank]
            return self._start_pairwise("all_gather", pieces, [own_piece] * self.size)
        return self._start_each("all_gather", pieces, self._group.broadcast)

    def _start_each(
        self, operation: str, pieces: Sequence[Tensor], call: Callable[..., Any]
    ) -> Work:
        """Start a collective with a root for each rank's piece: no backend has them for pieces that
        are not equal.
        """
        pieces_by_root = [(root, piece) for root, piece in enumerate(pieces) if piece.numel()]
        self._parts_of_one += len(pieces_by_root) - 1
        return self._start(
            operation,
            lambda views: SeveralWorks(
                [call(view, root) for (root, _), view in zip(pieces_by_root, views, strict=True)]
            ),
            *(piece for _, piece in pieces_by_root),
        )

    def _sends_directly(self, tensor: Tensor) -> bool:
        """Return whether ranks exchange pieces of it by send and receive.

        Raises:
            TransportError: it is on a device, whose addresses gloo would take for the CPU's.
        """
        if self.transport == "gloo" and not tensor.is_cpu:
            raise TransportError(
                f"gloo exchanges pieces of tensors on the CPU only, but this one is on "
                f"{tensor.device}: sharded optimizers, reduction='reproducible' and gathers need "
                "transport=nccl for a model on GPUs"
            )
        return self.transport == "gloo"

    def _start_reduce_scatter(self, out: Tensor, tensor: Tensor) -> Work:
        if not self._sends_directly(tensor):
            return self._start(
                "reduce_scatter_sum",
                lambda both: self._group._reduce_scatter_base(*both),
                out,
                tensor,
            )
        return self._start_summing_exchange(out, list(tensor.chunk(self.size)))

    def _start_uneven_reduce_scatter(self, pieces: list[Tensor]) -> Work:
        if self._sends_directly(pieces[0]):
            return self._start_summing_exchange(pieces[self.rank], pieces)

        def reduce(view: Tensor, root: int) -> Any:
            options = dist.ReduceOptions()
            options.rootRank = root
            return self._group.reduce([view], options)

        return self._start_each("reduce_scatter_sum", pieces, reduce)

    def _start_summing_exchange(self, out: Tensor, pieces: list[Tensor]) -> Work:
        """Start a reduce-scatter of gloo.

        Gloo's own sends as many bytes as an all-reduce and takes longer. Here each rank sends the
        others their pieces, and adds up what it receives in rank order. That needs extra memory, of
        two tensors at most, which is kept: a third exchange waits for the oldest.
        """
        while self._summing and (not self._memory or self._summing[0].after is None):
            self._summing.popleft().wait()
        own_piece = pieces[self.rank]
        needed = (self.size - 1) * own_piece.nbytes
        memory = self._memory.pop()
        if memory.numel() < needed:
            # As bytes, so that it serves gradients of any dtype.
            memory = torch.empty(needed, dtype=torch.uint8, device=own_piece.device)
        received = memory[:needed].view(own_piece.dtype)
        parts = list(received.view(self.size - 1, own_piece.numel()).unbind())
        parts.insert(self.rank, own_piece)

        def add_up() -> None:  # once all have arrived, so the order is that of ranks
            sum_into(out, parts)
            self._memory.append(memory)

        exchange = self._start_pairwise("reduce_scatter_sum", parts, pieces, at_once=True)
        self._summing.append(ChainedWork(exchange, add_up))
        return self._summing[-1]

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
        # gloo counts each send and receive, which are one collective of ours.
        self._parts_of_one += len(travel) - 1
        return self._start(
            operation,
            lambda _: PairwiseExchange(self._group, self.rank, into, pieces, at_once=at_once),
        )

    def _start_exchange(
        self, received: Tensor, sent: Tensor, receive_counts: list[int], send_counts: list[int]
    ) -> Work:
        if self._sends_directly(sent):
            into, pieces = received.split(receive_counts), sent.split(send_counts)
            into[self.rank].copy_(pieces[self.rank])
            return self._start_pairwise("all_to_all", into, pieces)
        return self._start(
            "all_to_all",
            lambda both: self._group.alltoall_base(*both, receive_counts, send_counts),
            received,
            sent,
        )

    def _start_broadcast(self, flat: Tensor, source: int) -> Work:
        return self._start("broadcast", lambda views: self._group.broadcast(views[0], source), flat)

    def _start_barrier(self) -> Work:
        return self._start("barrier", lambda _: self._group.barrier())


def group_of_torch(device: torch.device | str = "cpu") -> TorchGroup:
    """Return the ranks of `init_process_group()`; this process alone where there is but one.

    Raises:
        ConfigError: a launcher has started more processes than this, and they have not met; or
            they have, over a backend that does not serve the model's device.
    """
    if dist.is_available() and dist.is_initialized():
        backends = dist.get_backend_config()  # "cpu:gloo,cuda:nccl", say
        kind = torch.device(device).type
        if f"{kind}:" not in backends and dist.get_world_size() > 1:
            raise ConfigError(
                f"the model is on {device}, but the backend of init_process_group() serves other "
                f"devices ({backends}): move the model there before the Accumulator is built, or "
                "call init_process_group() without a backend, which serves both"
            )
        return TorchGroup.wrap(dist.group.WORLD, device=device)
    # Variables in which launchers state how many processes they have started.
    for name in ("WORLD_SIZE", RUN_RANKS, "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        if (ranks := os.environ.get(name, "")).isdecimal() and int(ranks) > 1:
            raise ConfigError(
                f"{name}={ranks}, but torch.distributed.init_process_group() was not called, so "
                f"each of the {ranks} ranks would train alone: call it before the Accumulator is "
                "built, or give it TorchGroup.alone() if that is meant"
            )
    return TorchGroup.alone(device=device)


# ------------------------------------------------------------------ Choice of the transport


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCapabilities:
    """Report of a rank at its arrival.

    Attributes:
        transport: the one that it was configured with.
        gpu: identity of its own GPU, unique in the world, or "" when it has none. As for NCCL,
            ranks with different NCCL_HOSTID have different ones.
        npu: the same of its own NPU, where the transport is HCCL.
        nccl: whether this torch was built with NCCL.
        device_request: the setting that requests accelerators, "" for none.
        device_error: why this rank's device cannot be used, where it has one that fails.
    """

    rank: int
    node: str
    transport: str
    gpu: str = ""
    npu: str = ""
    nccl: bool = False
    device_request: str = ""
    device_error: str = ""


def gpu_index(local_rank: int) -> int | None:
    """Return the CUDA device of this rank, or None when there are too few for one each.

    Where the scheduler shows a rank nothing but its own GPU, that one is number 0 on every rank.
    """
    return _device_index(local_rank, torch.cuda.device_count())


def _device_index(local_rank: int, count: int) -> int | None:
    if local_rank < count:
        return local_rank
    return 0 if count == 1 else None


def _npu_index(local_rank: int) -> int | None:
    """Return the NPU of this rank, as `gpu_index` does."""
    importlib.import_module("torch_npu")  # makes torch know the device
    return _device_index(local_rank, torch.get_device_module("npu").device_count())


def _npu_of(spec: GroupSpec) -> str:
    """Return the identity of this rank's own NPU; "" if it has none."""
    if spec.transport != "hccl" or importlib.util.find_spec("torch_npu") is None:
        return ""
    index = _npu_index(spec.local_rank)
    if index is None:
        return ""
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return f"{spec.node} {names[index] if index < len(names) else index}"


def read_capabilities(spec: GroupSpec) -> RankCapabilities:
    """Return this rank's report, after a look at its device."""
    gpu, error = "", ""
    index = gpu_index(spec.local_rank) if torch.cuda.is_available() else None
    if index is not None:
        try:
            uuid = torch.cuda.get_device_properties(index).uuid
            gpu = f"{os.environ.get('NCCL_HOSTID', '')} {uuid}"
        except RuntimeError as failed:  # it is listed, and does not answer
            error = f"GPU {index}: {str(failed).strip().splitlines()[0]}"
    return RankCapabilities(
        rank=spec.rank,
        node=spec.node,
        transport=spec.transport,
        gpu=gpu,
        npu=_npu_of(spec),
        nccl=dist.is_nccl_available(),
        device_request=spec.device_request,
        device_error=error,
    )


class Transport(ABC):
    """A transport of torch jobs, used as a class; there are no instances.

    Third-party transports are found through the entry points `orchestrator.transports`; their
    groups pass `orchestrator.engine.conformance`.
    """

    @classmethod
    def lacking(cls, everyone: Sequence[RankCapabilities]) -> str:
        """Return why these ranks cannot use it, in a sentence; "" where they can."""
        del everyone
        return ""

    @classmethod
    def device(cls, local_rank: int) -> torch.device:
        """Return where tensors live."""
        del local_rank
        return torch.device("cpu")

    @classmethod
    def prepare(cls, spec: GroupSpec) -> None:
        """Prepare this process for groups of the transport, those of torch itself included."""

    @classmethod
    @abstractmethod
    def form(cls, spec: GroupSpec, store: Store) -> BaseGroup:
        """Form the group of ranks that have all arrived. Collective.

        Args:
            store: of torch.distributed, which all ranks see and no other process writes into.

        Raises:
            RuntimeError: the ranks cannot be connected.
        """


def transport_of(name: str) -> type[Transport]:
    """Return the transport of a name. Raises `TransportError` where there is none."""
    try:
        return TRANSPORTS.load(name, Transport)
    except ConfigError as error:
        raise TransportError(str(error)) from error


def choose(everyone: Sequence[RankCapabilities]) -> str:
    """Return the transport for these ranks: NCCL where each has a GPU of its own, gloo where no
    devices were requested.

    Raises:
        TransportError: ranks ask for different ones, or for one that cannot be had here.
    """
    names = {rank.transport for rank in everyone}
    if len(names) > 1:
        raise TransportError(f"ranks ask for different transports: {', '.join(sorted(names))}")
    name = names.pop()
    if name == "mccl":
        raise TransportError(
            "transport=mccl belongs to MindSpore; a torch job on CPUs uses transport=gloo"
        )
    if name == "auto":
        lacking = _without_own_gpu(everyone)
        request = next((rank.device_request for rank in everyone if rank.device_request), "")
        if lacking and request:  # CPUs would be a silent fallback
            raise TransportError(
                f"devices were asked for ({request}), but transport=auto found that "
                f"not every rank has one: {lacking}. Computing on CPUs instead has to be said: "
                "transport=gloo; NPUs are used with transport=hccl"
            )
        return "gloo" if lacking else "nccl"
    try:
        with TRANSPORTS.wrap_errors(name, "to say whether these ranks can use it"):
            lacking = transport_of(name).lacking(everyone)
    except ConfigError as error:  # which all ranks get
        raise TransportError(str(error)) from error
    if lacking:
        raise TransportError(lacking)
    return name


def _without_own_gpu(everyone: Sequence[RankCapabilities]) -> str:
    """Return why these ranks cannot use NCCL, or ""."""
    for rank in everyone:
        if not rank.nccl:
            return f"torch {torch.__version__} on {rank.node} was built without NCCL"
        if rank.device_error:
            return f"rank {rank.rank} on {rank.node} cannot use its device: {rank.device_error}"
        if not rank.gpu:
            return f"rank {rank.rank} on {rank.node} has no GPU that torch can use"
    return _sharing("GPU", {peer.rank: peer.gpu for peer in everyone}, everyone)


def _sharing(kind: str, devices: Mapping[int, str], everyone: Sequence[RankCapabilities]) -> str:
    """Return which ranks share a device; "" if none do."""
    owner: dict[str, RankCapabilities] = {}
    for rank in everyone:
        first = owner.setdefault(devices[rank.rank], rank)
        if first is not rank:
            return f"ranks {first.rank} and {rank.rank} on {rank.node} share one {kind}"
    return ""


class _ProcessGroupTransport(Transport):
    """A transport over a process group object of torch.distributed."""

    @classmethod
    @abstractmethod
    def connect(cls, spec: GroupSpec, store: Store) -> Any:
        """Form the process group object."""

    @classmethod
    def form(cls, spec: GroupSpec, store: Store) -> TorchGroup:
        device = cls.device(spec.local_rank)
        # NCCL and HCCL exchange addresses over it at their first collective, for which a rank may
        # be late by as long as it takes to build its data.
        store.set_timeout(timedelta(seconds=spec.collective_timeout_s))
        cls.prepare(spec)
        process_group = cls.connect(spec, store)
        # It stays until the end of the process. To destroy a gloo group blocks until the time-out
        # of its pending operations, on every rank that was not a neighbour of the one that died; a
        # rank that lost its peers has to end at once.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))
        return TorchGroup(
            process_group,
            rank=spec.rank,
            size=spec.size,
            generation=spec.generation,
            transport=cls.__name__.lower(),
            device=device,
            wait_timeout_s=None if device.type == "cpu" else spec.collective_timeout_s,
        )


class Gloo(_ProcessGroupTransport):
    """gloo on CPUs. Listens only at `spec.address`."""

    @classmethod
    def connect(cls, spec: GroupSpec, store: Store) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=spec.address)]
        options._timeout = timedelta(seconds=spec.timeout_s)
        options._threads = 2  # buckets under way at a time
        group = gloo(store, spec.rank, spec.size, options)
        # The constructor waits for its peers with the same time-out as collectives do later.
        group._set_default_timeout(timedelta(seconds=spec.collective_timeout_s))
        return group


def _watchdog_timeout(spec: GroupSpec) -> timedelta:
    """Return a longer time than ranks wait: the watchdog ends the process without an error."""
    return timedelta(seconds=spec.collective_timeout_s + 60.0)


class Nccl(_ProcessGroupTransport):
    """NCCL on NVIDIA GPUs, one per rank."""

    @classmethod
    def lacking(cls, everyone: Sequence[RankCapabilities]) -> str:
        lacking = _without_own_gpu(everyone)
        return lacking and (
            f"transport=nccl needs a GPU of its own for every rank, and a torch built with NCCL: "
            f"{lacking}. Use transport=gloo, which runs on CPUs, or fewer ranks a node"
        )

    @classmethod
    def device(cls, local_rank: int) -> torch.device:
        return torch.device("cuda", gpu_index(local_rank) or 0)

    @classmethod
    def prepare(cls, spec: GroupSpec) -> None:
        torch.cuda.set_device(cls.device(spec.local_rank))
        if spec.survive:  # else its watchdog ends this process too, when it sees a peer's end
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        # After a time-out its watchdog writes there which collectives each rank had begun.
        for variable in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
            os.environ.setdefault(variable, str(spec.folder / "nccl_trace_rank_"))

    @classmethod
    def connect(cls, spec: GroupSpec, store: Store) -> Any:
        nccl: Any = getattr(dist, "ProcessGroupNCCL")  # noqa: B009  # absent from builds for CPUs
        options = nccl.Options()
        options._timeout = _watchdog_timeout(spec)
        group = nccl(store, spec.rank, spec.size, options)
        # It would connect at the first collective. Now all ranks are here, so a wrong network
        # interface, or two ranks on one GPU, is an error of the start and named as one.
        group.eager_connect_single_device(cls.device(spec.local_rank))
        return group


class Hccl(_ProcessGroupTransport):
    """HCCL on Ascend NPUs, one per rank. Untested: there was no NPU."""

    @classmethod
    def lacking(cls, everyone: Sequence[RankCapabilities]) -> str:
        if importlib.util.find_spec("torch_npu") is None:
            return (
                "transport=hccl needs Ascend NPUs and the package torch_npu, which is not "
                "installed here; install it together with CANN, or use transport=gloo"
            )
        without = next((rank for rank in everyone if not rank.npu), None)
        if without is not None:
            lacking = f"rank {without.rank} on {without.node} has no NPU that torch can use"
        else:
            lacking = _sharing("NPU", {rank.rank: rank.npu for rank in everyone}, everyone)
        return lacking and (
            f"transport=hccl needs an NPU of its own for every rank: {lacking}. Use fewer ranks a "
            "node (cluster.ranks_per_node), or transport=gloo, which runs on CPUs"
        )

    @classmethod
    def device(cls, local_rank: int) -> torch.device:
        return torch.device("npu", _npu_index(local_rank) or 0)  # `lacking` has refused None

    @classmethod
    def prepare(cls, spec: GroupSpec) -> None:
        # Without it a wait blocks a stream only, and no lost peer is ever noticed.
        os.environ.setdefault("HCCL_BLOCKING_WAIT", "1")
        os.environ.setdefault("HCCL_EXEC_TIMEOUT", hccl_exec_timeout(spec.collective_timeout_s))
        device = cls.device(spec.local_rank)  # first, as it makes torch know the module
        torch.get_device_module("npu").set_device(device)

    @classmethod
    def connect(cls, spec: GroupSpec, store: Store) -> Any:
        # The constructor is the one that torch_npu registers.
        npu: Any = importlib.import_module("torch_npu")
        return npu._C._distributed_c10d.ProcessGroupHCCL(
            store, spec.rank, spec.size, _watchdog_timeout(spec)
        )
