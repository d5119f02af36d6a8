"""`MindSporeGroup`: a `Group` over MCCL (CPU), NCCL or HCCL, formed without `msrun`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, communication, nn, ops

from orchestrator.engine.api import Group, GroupSpec
from orchestrator.engine.common.waiting import for_others, hccl_exec_timeout
from orchestrator.engine.mindspore.rendezvous import (
    Scheduler,
    await_verdict,
    decide,
    is_literal,
    leave_together,
    scheduler_of,
)
from orchestrator.errors import PeerLost, RendezvousError, TransportError

DEVICE_OF = {"mccl": "CPU", "nccl": "GPU", "hccl": "Ascend"}


def available(device: str) -> bool:
    """Return whether this MindSpore can compute on `device` on this machine."""
    return device == "CPU" or bool(ms.hal.is_available(device))


def choose_transport(spec: GroupSpec) -> str:
    """Return the transport to use. Raises `TransportError` for what this machine cannot offer."""
    transport = spec.transport
    if transport == "auto":
        first = next(t for t in ("hccl", "nccl", "mccl") if available(DEVICE_OF[t]))
        if first == "mccl" and spec.device_request:
            raise TransportError(
                f"devices were asked for ({spec.device_request}), but MindSpore finds neither an "
                f"Ascend NPU nor a GPU that it can use for rank {spec.rank} on {spec.node} (is "
                f"CANN installed there, and its set_env.sh sourced?). Computing on CPUs instead "
                f"has to be said: transport=mccl"
            )
        return first
    if transport not in DEVICE_OF:
        raise TransportError(
            f"transport={transport} is not one of MindSpore's; it has hccl (Ascend), nccl (GPU) "
            f"and mccl (CPU); try transport=auto"
        )
    if not available(DEVICE_OF[transport]):
        raise TransportError(
            f"transport={transport} needs MindSpore with {DEVICE_OF[transport]} support and such a "
            f"device, but this machine has neither"
            + (" (is CANN installed, and its set_env.sh sourced?)" if transport == "hccl" else "")
            + "; try transport=mccl"
        )
    return transport


def device_of_rank(
    transport: str, local_rank: int, environment: Mapping[str, str]
) -> tuple[int, str]:
    """Return the number of a rank's device among those that it may see, its local rank's; and the
    device's name on the node, by which ranks that share it are found.

    A scheduler that gives each rank its own device shows it one only, which then is number 0.

    >>> device_of_rank("hccl", 3, {})
    (3, 'Ascend 3')
    >>> device_of_rank("hccl", 3, {"ASCEND_RT_VISIBLE_DEVICES": "6"})
    (0, 'Ascend 6')

    Raises:
        TransportError: there are fewer than the ranks of the node need.
    """
    visible = {"nccl": "CUDA_VISIBLE_DEVICES", "hccl": "ASCEND_RT_VISIBLE_DEVICES"}
    variable = visible[transport]
    listed = environment.get(variable)
    kind = DEVICE_OF[transport]
    if listed is None:
        return local_rank, f"{kind} {local_rank}"
    seen = [name.strip() for name in listed.split(",") if name.strip()]
    if len(seen) == 1:
        return 0, f"{kind} {seen[0]}"
    if local_rank >= len(seen):
        raise TransportError(
            f"local rank {local_rank} has no device: {variable}={listed} shows {len(seen)}; ask "
            f"the scheduler for one a rank, or set cluster.ranks_per_node={max(1, len(seen))}"
        )
    return local_rank, f"{kind} {seen[local_rank]}"


def variables(
    spec: GroupSpec, transport: str, scheduler: tuple[str, int], present: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment variables of a worker, needed before MindSpore's cluster forms.

    Args:
        scheduler: address and port of MindSpore's scheduler process.
        present: the environment; what a person set of HCCL's time-outs there is left alone.
    """
    values = {
        "MS_ROLE": "MS_WORKER",
        "MS_WORKER_NUM": str(spec.size),
        "MS_NODE_ID": str(spec.rank),
        "MS_SCHED_HOST": str(scheduler[0]),
        "MS_SCHED_PORT": str(scheduler[1]),
        "MS_TOPO_TIMEOUT": str(max(1, round(spec.timeout_s))),
    }
    collective_timeout = str(max(1, round(spec.collective_timeout_s)))
    if transport == "mccl":
        values["MS_CPU_COMM_OP_TIMEOUT"] = collective_timeout
    if transport == "hccl":
        connect_timeout = min(7200, max(120, round(spec.timeout_s)))  # HCCL's limits, by its manual
        for name, seconds in (
            ("HCCL_EXEC_TIMEOUT", hccl_exec_timeout(spec.collective_timeout_s)),
            ("HCCL_CONNECT_TIMEOUT", str(connect_timeout)),
        ):
            values[name] = present.get(name, seconds)
    return values


# ------------------------------------------------------------------ MindSporeGroup
# MindSpore knows one world per process, so an attempt has one generation.


class MindSporeGroup(Group):
    """Ranks in processes. With one rank nothing is sent and nothing is counted.

    Args:
        scheduler: MindSpore's, on rank 0 of several.
        leave: returns once every rank has called it.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        transport: str,
        scheduler: Scheduler | None = None,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(rank=rank, size=size, transport=transport)
        self._scheduler, self._leave = scheduler, leave
        self._noted: set[Any] = set()

    # ------------------------------------------------------------------ collectives

    def all_reduce_sum(self, tensor: Tensor) -> None:
        for total in self.sums([tensor]):
            tensor.assign_value(total)

    def sums(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums over ranks of several tensors, one collective each, launched together."""
        for tensor in tensors:
            self._admit("all_reduce_sum", 2 * (self.size - 1) * _bytes(tensor))
        if self.size == 1:
            return list(tensors)
        with self._awaiting("all_reduce_sum"):
            totals = [self._launch_sum(part.reshape(-1)).reshape(part.shape) for part in tensors]
            self._complete(totals[-1])
        return totals

    def all_gather(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        every = self._leading_sizes(tensor.shape, sizes)
        size = sum(every) * math.prod(tensor.shape[1:]) * tensor.itemsize
        self._admit("all_gather", (self.size - 1) * size)
        if self.size == 1:
            return tensor.copy()
        with self._awaiting("all_gather"):
            gathered = self._launch_gather(tensor, every)
            self._complete(gathered)
        return gathered

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        if not 0 <= source < self.size:
            raise ValueError(f"`source` must be a rank below {self.size}, but is {source}")
        self._admit("broadcast", (self.size - 1) * _bytes(tensor))
        if self.size == 1:
            return
        carried, back = self._as_carried(tensor.reshape(-1))
        broadcast: Any = ops.Broadcast(source)
        with self._awaiting("broadcast"):
            (result,) = broadcast((carried,))
            self._complete(result)
        tensor.assign_value(back(result).reshape(tensor.shape))

    def barrier(self) -> None:
        self._admit("barrier", 0)
        if self.size == 1:
            return
        with self._awaiting("barrier"):  # MCCL has none of its own
            self._complete(self._launch_sum(ops.zeros((1,), ms.float32)))

    def close(self) -> None:
        """Wait for all ranks, and end the scheduler. The group is of no use afterwards."""
        self.barrier()
        with for_others("leaving the group"):
            self._leave()
        if self._scheduler is not None:
            self._scheduler.end()

    # ------------------------------------------------------------------ the parts

    def _complete(self, last: Tensor) -> None:
        """Return when a result is computed; a device computes the collectives before it first."""
        (last if self.transport == "mccl" else last.reshape(-1)[:1]).asnumpy()

    def _launch_sum(self, flat: Tensor) -> Tensor:
        if self.transport != "mccl" or flat.dtype in (ms.float32, ms.float16):
            reduce: Any = ops.AllReduce()
            return reduce(flat)
        if flat.dtype not in self._noted:
            self._noted.add(flat.dtype)
            print(
                f"note: MCCL has no all-reduce of {flat.dtype}; the ranks' parts are gathered and "
                f"added in the order of ranks instead",
                flush=True,
            )
        parts = self._launch_gather(flat, (flat.shape[0],) * self.size)
        return parts.reshape(self.size, -1).sum(axis=0).astype(flat.dtype)

    def _launch_gather(self, tensor: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Equal parts are gathered, so shorter ones travel padded to the longest."""
        longest = max(sizes)
        carried, back = self._as_carried(tensor)
        missing = longest - tensor.shape[0]
        if missing:
            padding = ops.zeros((missing, *carried.shape[1:]), carried.dtype)
            carried = ops.concat([carried, padding]) if tensor.shape[0] else padding
        if carried.size == 0:
            return tensor.copy()
        gathered = back(ops.AllGather()(carried))
        if min(sizes) == longest:
            return gathered
        pieces = [
            gathered[place * longest : place * longest + size] for place, size in enumerate(sizes)
        ]
        return ops.concat([piece for piece in pieces if piece.shape[0]])

    def _as_carried(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """`tensor` in a type that the transport carries, and the way back."""
        dtype = tensor.dtype
        if self.transport != "mccl" or dtype in (ms.float32, ms.int32):
            return tensor, lambda result: result
        if tensor.itemsize >= 8:
            # MCCL takes these, but a float64 keeps a float32's digits only and an int64 its lower
            # half; int32 arrives as it was, so the bits travel as those.
            array = np.ascontiguousarray(tensor.asnumpy())
            rest = array.shape[1:]
            bits = array.reshape(array.shape[0], math.prod(rest)).view(np.int32)

            def as_before(result: Tensor) -> Tensor:
                return Tensor(result.asnumpy().view(array.dtype).reshape(-1, *rest))

            return Tensor(bits), as_before
        wide = ms.float32 if dtype in (ms.float16, ms.bfloat16) else ms.int32
        return tensor.astype(wide), lambda result: result.astype(dtype)

    @contextmanager
    def _awaiting(self, operation: str) -> Generator[None]:
        """Mark the wait for a collective, from its launch, which waits itself on a CPU.

        Raises:
            PeerLost: it timed out.
        """
        try:
            with for_others(operation):
                yield
        except RuntimeError as error:
            text = str(error).strip()
            if not any(phrase in text.lower() for phrase in ("timeout", "timed out", "time out")):
                raise
            first = text.splitlines()[0]
            raise PeerLost(f"rank {self.rank}: {operation} did not end: {first}") from error


def _bytes(tensor: Tensor) -> int:
    return int(tensor.size) * int(tensor.itemsize)


# ------------------------------------------------------------------
# Differentiable collectives: the backward is the adjoint of the map on the stacked ranks
#
# | forward, on every rank | backward on rank r |
# |---|---|
# | `AllReduceSum`: y = sum_q x_q | sum_q g_q |
# | `AllReduceMean`: y = (1/R) sum_q x_q | (1/R) sum_q g_q |
# | `AllGather`: y = [x_0, ..., x_{R-1}], blocks of any size | block r of sum_q g_q |
#
# They replace the framework's own, whose backward is wrong or missing: that of `ops.AllGather`
# needs ReduceScatter, which MCCL does not have, and that of `ops.Broadcast` is the identity. They
# work in PyNative mode and under `jit`. Every rank has to run the same ones in the same order,
# backward included: a graph drops a collective whose result one rank does not use, and then pairs
# the others wrongly. MindSpore refuses to differentiate twice. MCCL keeps a float32's digits of a
# float64 without a message, so these refuse it.


class _Collective(nn.Cell):
    """The plain sum over ranks, for the backward of all three."""

    def __init__(self, group: MindSporeGroup) -> None:
        super().__init__()
        self.alone, self.mccl = group.size == 1, group.transport == "mccl"
        self.reduce: Any = None if self.alone else ops.AllReduce()

    def total(self, x: Tensor) -> Tensor:
        if self.alone:
            return x
        if self.mccl and x.dtype == ms.float64:
            raise TypeError("MCCL has no collectives of float64 with a gradient; use float32")
        return self.reduce(x)


class AllReduceSum(_Collective):
    """y = sum_q x_q on every rank; backward: sum_q g_q. Any shape."""

    def construct(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.total(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:  # noqa: ARG002  # MindSpore's form
        return (self.total(dout),)


class AllReduceMean(_Collective):
    """y = (1/R) sum_q x_q on every rank; backward: (1/R) sum_q g_q."""

    def __init__(self, group: MindSporeGroup) -> None:
        super().__init__(group)
        self.share = 1.0 / group.size

    def construct(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.total(x) * self.share

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:  # noqa: ARG002  # MindSpore's form
        return (self.total(dout) * self.share,)


class AllGather(_Collective):
    """y = [x_0, ..., x_{R-1}] along axis 0 on every rank; backward: block r of sum_q g_q.

    Args:
        sizes: leading sizes n_0..n_{R-1}, each at least 1; equal on all ranks.

    The input's shape is (n_r, ...), the output's (sum of sizes, ...). Uneven blocks travel padded.
    """

    def __init__(self, group: MindSporeGroup, sizes: Sequence[int]) -> None:
        super().__init__(group)
        if len(sizes) != group.size or min(sizes) < 1:
            raise ValueError(
                f"`sizes` must be {group.size} leading sizes of at least 1, but is {list(sizes)}"
            )
        self.gather: Any = None if self.alone else ops.AllGather()
        longest = max(sizes)
        self.missing = longest - sizes[group.rank]
        self.spans = tuple(
            (place * longest, place * longest + size) for place, size in enumerate(sizes)
        )
        self.start = sum(sizes[: group.rank])
        self.stop = self.start + sizes[group.rank]

    def construct(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.alone:
            return x
        if self.mccl and x.dtype == ms.float64:
            raise TypeError("MCCL has no collectives of float64 with a gradient; use float32")
        padded = x
        if self.missing:
            padded = ops.concat((x, ops.zeros((self.missing, *x.shape[1:]), x.dtype)))
        gathered = self.gather(padded)
        pieces: Any = ()
        for start, stop in self.spans:
            pieces = (*pieces, gathered[start:stop])
        return ops.concat(pieces)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:  # noqa: ARG002  # MindSpore's form
        return (self.total(dout)[self.start : self.stop],)


# ------------------------------------------------------------------ Forming a group
# `msrun` is not used: SLURM or the local cluster has started every rank already, so only the
# scheduler process, which rank 0 starts, and environment variables remain.


def form_group(spec: GroupSpec) -> MindSporeGroup:
    """Meet all ranks. Collective; to be called before any tensor is made.

    Raises:
        TransportError: the transport is not there, ranks share a device, or the address is no IP
            literal.
        RendezvousError: ranks are missing (they are named), or the scheduler does not start.
        StopRequested: a rank was asked to stop meanwhile; raised on all.
    """
    transport = choose_transport(spec)
    device, own_device = DEVICE_OF[transport], ""
    # Where the compiler leaves its files about code that it cannot compile; else in the cwd.
    os.environ.setdefault("MS_OM_PATH", str(spec.folder))
    if device != "CPU":
        index, own_device = device_of_rank(transport, spec.local_rank, os.environ)
        ms.set_device(device, index)
        print(f"rank {spec.rank} on {spec.node} computes on {device} {index}", flush=True)
    else:
        # A CPU's kernels run on the cores that issue them: queues between the two are threads that
        # spin while they wait for each other, for two fifths of four ranks' processor time.
        ms.runtime.launch_blocking()
    if spec.size == 1:
        return MindSporeGroup(rank=0, size=1, transport=transport)
    if not is_literal(spec.address):
        raise TransportError(
            f"MindSpore takes IP addresses only, but the address of {spec.node} is "
            f"{spec.address!r}; choose its interface: cluster.interface=eth0, say"
        )
    if communication.GlobalComm.INITED:
        raise RendezvousError(
            "MindSpore forms one group in a process's life; start the ranks again instead"
        )
    if spec.rank:
        scheduler, verdict = None, await_verdict(spec, own_device)
    else:
        scheduler, verdict = _host(spec, own_device)
    if os.environ.pop("RANK_TABLE_FILE", None):
        print(
            "note: RANK_TABLE_FILE is not used; ranks meet in MindSpore's dynamic cluster",
            flush=True,
        )
    host, port = verdict["scheduler"]
    os.environ.update(variables(spec, transport, (host, port), os.environ))
    try:
        communication.init()
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        raise RendezvousError(
            f"rank {spec.rank} on {spec.node} met the others, but MindSpore's cluster did not "
            f"form: {first}"
        ) from error
    numbered = communication.get_rank(), communication.get_group_size()
    if numbered != (spec.rank, spec.size):
        raise RendezvousError(
            f"MindSpore numbered rank {spec.rank} of {spec.size} as {numbered[0]} of {numbered[1]}"
        )
    return MindSporeGroup(
        rank=spec.rank,
        size=spec.size,
        transport=transport,
        scheduler=scheduler,
        leave=partial(leave_together, spec),
    )


def _host(spec: GroupSpec, device: str) -> tuple[Scheduler, dict[str, Any]]:
    """Start the scheduler, and decide whether all ranks have come. For rank 0."""
    scheduler = scheduler_of(spec)

    def ready() -> dict[str, Any] | None:
        return {"scheduler": [spec.address, scheduler.port]} if scheduler.ready() else None

    try:
        verdict = decide(spec, ready, device)
    except BaseException:
        scheduler.end()
        raise
    scheduler.watch()
    return scheduler, verdict
