"""Transports of the torch engine, one class each, and the choice between them.

Rank 0 chooses, from what every rank reports, so all ranks use the same transport. A transport that
was requested by name and is not available is refused; there is no fallback.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from orchestrator.engine.api import GroupSpec
from orchestrator.engine.torch.group import BaseGroup
from orchestrator.engine.torch.process_group import TorchGroup, keep_forever
from orchestrator.errors import ConfigError, TransportError
from orchestrator.plugins import TRANSPORTS


@dataclass(frozen=True, kw_only=True, slots=True)
class Presence:
    """Report of a rank at its arrival.

    Attributes:
        node: name of its node.
        asked: the transport that it was configured with.
        gpu: identity of its own GPU, unique in the world, or "" when it has none.
        nccl: whether this torch was built with NCCL.
        devices_asked: the setting that requests accelerators, "" for none.
        device_error: why this rank's device cannot be used, where it has one that fails.
    """

    rank: int
    node: str
    asked: str
    gpu: str = ""
    nccl: bool = False
    devices_asked: str = ""
    device_error: str = ""


def gpu_index(local_rank: int) -> int | None:
    """Return the CUDA device of this rank, or None when there are too few for one each.

    Where the scheduler shows a rank nothing but its own GPU, that one is number 0 on every rank.
    """
    count = torch.cuda.device_count()
    if local_rank < count:
        return local_rank
    return 0 if count == 1 else None


def presence(spec: GroupSpec) -> Presence:
    """Return this rank's report."""
    gpu, error = "", ""
    index = gpu_index(spec.local_rank) if torch.cuda.is_available() else None
    if index is not None:
        try:
            gpu = str(torch.cuda.get_device_properties(index).uuid)
        except RuntimeError as failed:  # it is listed, and does not answer
            error = f"GPU {index}: {str(failed).strip().splitlines()[0]}"
    return Presence(
        rank=spec.rank,
        node=spec.node,
        asked=spec.transport,
        gpu=gpu,
        nccl=dist.is_nccl_available(),
        devices_asked=spec.devices_asked,
        device_error=error,
    )


class Transport(ABC):
    """A transport of torch jobs, used as a class; there are no instances.

    Third-party transports are found through the entry points `orchestrator.transports`; their
    groups pass `orchestrator.engine.conformance`.
    """

    @classmethod
    def lacking(cls, everyone: Sequence[Presence]) -> str:
        """Why these ranks cannot use it, in a sentence; "" where nothing stands against it."""
        del everyone
        return ""

    @classmethod
    def device(cls, local_rank: int) -> torch.device:
        """Return where tensors live."""
        del local_rank
        return torch.device("cpu")

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


def choose(everyone: Sequence[Presence]) -> str:
    """Return the transport for these ranks: NCCL where each has a GPU of its own, gloo where no
    devices were requested.

    Raises:
        TransportError: ranks ask for different ones, or for one that cannot be had here.
    """
    asked = {one.asked for one in everyone}
    if len(asked) > 1:
        raise TransportError(f"ranks ask for different transports: {', '.join(sorted(asked))}")
    name = asked.pop()
    if name == "mccl":
        raise TransportError(
            "transport=mccl belongs to MindSpore; a torch job on CPUs uses transport=gloo"
        )
    if name == "auto":
        lacking = _without_own_gpu(everyone)
        if lacking:
            _refuse_cpu_fallback(everyone, lacking)
        return "gloo" if lacking else "nccl"
    if lacking := _lacking(name, everyone):
        raise TransportError(lacking)
    return name


def _lacking(name: str, everyone: Sequence[Presence]) -> str:
    """Return what the transport lacks; an error in it becomes one that all ranks get."""
    try:
        with TRANSPORTS.wrap_errors(name, "to say whether these ranks can use it"):
            return transport_of(name).lacking(everyone)
    except ConfigError as error:
        raise TransportError(str(error)) from error


def _without_own_gpu(everyone: Sequence[Presence]) -> str:
    """Return why these ranks cannot use NCCL, or ""."""
    owner: dict[str, Presence] = {}
    for one in everyone:
        if not one.nccl:
            return f"torch {torch.__version__} on {one.node} was built without NCCL"
        if one.device_error:
            return f"rank {one.rank} on {one.node} cannot use its device: {one.device_error}"
        if not one.gpu:
            return f"rank {one.rank} on {one.node} has no GPU that torch can use"
        first = owner.setdefault(one.gpu, one)
        if first is not one:
            return f"ranks {first.rank} and {one.rank} on {one.node} share one GPU"
    return ""


def _refuse_cpu_fallback(everyone: Sequence[Presence], lacking: str) -> None:
    """Raise `TransportError` if devices were requested: CPUs would be a silent fallback."""
    asking = next((one for one in everyone if one.devices_asked), None)
    if asking is None:
        return
    raise TransportError(
        f"devices were asked for ({asking.devices_asked}), but transport=auto found that not every "
        f"rank has one: {lacking}. Computing on CPUs instead has to be said: transport=gloo; NPUs "
        f"are used with transport=hccl"
    )


class _ProcessGroupTransport(Transport):
    """A transport over a process group object of torch.distributed."""

    @classmethod
    @abstractmethod
    def connect(cls, spec: GroupSpec, store: Store, device: torch.device) -> Any:
        """Form the process group object."""

    @classmethod
    def form(cls, spec: GroupSpec, store: Store) -> TorchGroup:
        device = cls.device(spec.local_rank)
        process_group = cls.connect(spec, store, device)
        keep_forever(process_group)
        return TorchGroup(
            process_group,
            rank=spec.rank,
            size=spec.size,
            generation=spec.generation,
            transport=cls.__name__.lower(),
            device=device,
        )


class Gloo(_ProcessGroupTransport):
    """gloo on CPUs. Listens only at `spec.address`."""

    @classmethod
    def connect(cls, spec: GroupSpec, store: Store, device: torch.device) -> Any:
        del device
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=spec.address)]
        options._timeout = timedelta(seconds=spec.timeout_s)
        options._threads = 2  # buckets under way at a time
        group = gloo(store, spec.rank, spec.size, options)
        # The constructor waits for its peers with the same time-out as collectives do later.
        group._set_default_timeout(timedelta(seconds=spec.collective_timeout_s))
        return group


class Nccl(_ProcessGroupTransport):
    """NCCL on NVIDIA GPUs, one per rank."""

    @classmethod
    def lacking(cls, everyone: Sequence[Presence]) -> str:
        lacking = _without_own_gpu(everyone)
        return lacking and (
            f"transport=nccl needs a GPU of its own for every rank, and a torch built with NCCL: "
            f"{lacking}. Use transport=gloo, which runs on CPUs, or fewer ranks a node"
        )

    @classmethod
    def device(cls, local_rank: int) -> torch.device:
        return torch.device("cuda", gpu_index(local_rank) or 0)

    @classmethod
    def connect(cls, spec: GroupSpec, store: Store, device: torch.device) -> Any:
        torch.cuda.set_device(device)
        nccl: Any = getattr(dist, "ProcessGroupNCCL")  # noqa: B009  # absent from builds for CPUs
        options = nccl.Options()
        options._timeout = timedelta(seconds=spec.collective_timeout_s)
        return nccl(store, spec.rank, spec.size, options)


class Hccl(_ProcessGroupTransport):
    """HCCL on Ascend NPUs, one per rank. Untested: there was no NPU."""

    @classmethod
    def lacking(cls, everyone: Sequence[Presence]) -> str:
        del everyone
        if importlib.util.find_spec("torch_npu") is not None:
            return ""
        return (
            "transport=hccl needs Ascend NPUs and the package torch_npu, which is not installed "
            "here; install it together with CANN, or use transport=gloo"
        )

    @classmethod
    def device(cls, local_rank: int) -> torch.device:
        return torch.device("npu", local_rank)

    @classmethod
    def connect(cls, spec: GroupSpec, store: Store, device: torch.device) -> Any:
        # The constructor is the one that torch_npu registers.
        npu: Any = importlib.import_module("torch_npu")
        torch.get_device_module("npu").set_device(device)
        return npu._C._distributed_c10d.ProcessGroupHCCL(
            store, spec.rank, spec.size, timedelta(seconds=spec.collective_timeout_s)
        )
