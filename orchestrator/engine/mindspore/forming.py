"""Form the group: choose the transport, meet, start MindSpore's cluster, watch the peers.

`msrun` is not used: every rank is started by SLURM or the local cluster already, so all that is
left is the scheduler process, which rank 0 starts, and environment variables.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
from typing import Any

import mindspore as ms
from mindspore import communication

from orchestrator.engine.api import GroupSpec
from orchestrator.engine.mindspore.group import MindSporeGroup
from orchestrator.engine.mindspore.liveness import Hub, Link
from orchestrator.engine.mindspore.rendezvous import decide, obey
from orchestrator.engine.mindspore.scheduler import Scheduler
from orchestrator.errors import RendezvousError, TransportError

DEVICE_OF = {"mccl": "CPU", "nccl": "GPU", "hccl": "Ascend"}
COLLECTIVE_TIMEOUT = {"mccl": "MS_CPU_COMM_OP_TIMEOUT", "hccl": "HCCL_EXEC_TIMEOUT"}


def available(device: str) -> bool:
    """Whether this MindSpore can compute on `device` on this machine."""
    return device == "CPU" or bool(ms.hal.is_available(device))


def choose_transport(asked: str) -> str:
    """The transport to use. Raises `TransportError` for what this machine cannot offer."""
    if asked == "auto":
        return next(t for t in ("hccl", "nccl", "mccl") if available(DEVICE_OF[t]))
    if asked not in DEVICE_OF:
        raise TransportError(
            f"transport={asked} is not one of MindSpore's; it has hccl (Ascend), nccl (GPU) and "
            f"mccl (CPU); try transport=auto"
        )
    if not available(DEVICE_OF[asked]):
        raise TransportError(
            f"transport={asked} needs MindSpore with {DEVICE_OF[asked]} support and such a device, "
            f"but this machine has neither"
            + (" (is CANN installed, and its set_env.sh sourced?)" if asked == "hccl" else "")
            + "; try transport=mccl"
        )
    return asked


def form_group(spec: GroupSpec) -> MindSporeGroup:
    """Meet all ranks. Collective; to be called before any tensor is made.

    Raises:
        TransportError: the transport is not there, or the address is no IP literal.
        RendezvousError: ranks are missing (they are named), or the scheduler does not start.
        StopRequested: a rank was asked to stop meanwhile; raised on all.
    """
    transport = choose_transport(spec.transport)
    device = DEVICE_OF[transport]
    # Where the compiler leaves its files about code that it cannot compile; else beside the user's.
    os.environ.setdefault("MS_OM_PATH", str(spec.folder))
    if device != "CPU":
        ms.set_device(device, spec.local_rank)
    if spec.size == 1:
        return MindSporeGroup(rank=0, size=1, transport=transport, generation=spec.generation)
    _check_address(spec)
    if spec.generation or communication.GlobalComm.INITED:
        raise RendezvousError(
            "MindSpore forms one group in a process's life; start the ranks again instead"
        )
    if spec.rank:
        verdict = obey(spec)
        watch: Any = Link(tuple(verdict["watch"]), verdict["token"], spec.rank, spec.node)
        scheduler = None
    else:
        watch, scheduler, verdict = _host(spec)
    _initialise(spec, transport, verdict)
    return MindSporeGroup(
        rank=spec.rank,
        size=spec.size,
        transport=transport,
        generation=spec.generation,
        watch=watch,
        scheduler=scheduler,
    )


def _check_address(spec: GroupSpec) -> None:
    try:
        ipaddress.ip_address(spec.address)
    except ValueError:
        raise TransportError(
            f"MindSpore takes IP addresses only, but the address of {spec.node} is "
            f"{spec.address!r}; set ORCHESTRATOR_NODE_ADDRESS to an IP address"
        ) from None


def _host(spec: GroupSpec) -> tuple[Hub, Scheduler, dict[str, Any]]:
    """Rank 0's part. The scheduler starts while the others are still importing."""
    token = secrets.token_hex(16)
    scheduler = Scheduler(spec.address, spec.size, spec.timeout_s)
    hub = Hub(spec.address, token)

    def ready() -> dict[str, Any] | None:
        if not scheduler.ready():
            return None
        return {
            "scheduler": [spec.address, scheduler.port],
            "watch": list(hub.endpoint),
            "token": token,
        }

    try:
        verdict = decide(spec, ready)
    except BaseException:
        hub.close(wait_s=0.0)
        scheduler.end()
        raise
    hub.watch_child(scheduler.process.pid, scheduler.process.poll)
    return hub, scheduler, verdict


def _initialise(spec: GroupSpec, transport: str, verdict: dict[str, Any]) -> None:
    host, port = verdict["scheduler"]
    os.environ.update(
        MS_ROLE="MS_WORKER",
        MS_WORKER_NUM=str(spec.size),
        MS_NODE_ID=str(spec.rank),
        MS_SCHED_HOST=str(host),
        MS_SCHED_PORT=str(port),
        MS_TOPO_TIMEOUT=str(max(1, round(spec.timeout_s))),
    )
    if transport in COLLECTIVE_TIMEOUT:
        os.environ[COLLECTIVE_TIMEOUT[transport]] = str(max(1, round(spec.collective_timeout_s)))
    try:
        communication.init()
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        raise RendezvousError(
            f"rank {spec.rank} on {spec.node} met the others, but MindSpore's cluster did not "
            f"form: {first}"
        ) from error
    found = communication.get_rank(), communication.get_group_size()
    if found != (spec.rank, spec.size):
        raise RendezvousError(
            f"MindSpore numbered rank {spec.rank} of {spec.size} as {found[0]} of {found[1]}"
        )
