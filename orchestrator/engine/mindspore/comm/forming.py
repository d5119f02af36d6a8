"""Form the group: choose the transport, meet, start MindSpore's cluster, watch the peers.

`msrun` is not used: every rank is started by SLURM or the local cluster already, so all that is
left is the scheduler process, which rank 0 starts, and environment variables.
"""

from __future__ import annotations

import os
import secrets
from typing import Any

import mindspore as ms
from mindspore import communication

from orchestrator.engine.api import GroupSpec
from orchestrator.engine.mindspore.comm.devices import (
    DEVICE_OF,
    choose_transport,
    device_index,
    variables,
)
from orchestrator.engine.mindspore.comm.liveness import Hub, Link
from orchestrator.engine.mindspore.comm.process_group import MindSporeGroup
from orchestrator.engine.mindspore.comm.rendezvous import decide, obey
from orchestrator.engine.mindspore.comm.scheduler import Scheduler, is_literal, scheduler_of
from orchestrator.errors import RendezvousError, TransportError

RANK_TABLE = "RANK_TABLE_FILE"


def form_group(spec: GroupSpec) -> MindSporeGroup:
    """Meet all ranks. Collective; to be called before any tensor is made.

    Raises:
        TransportError: the transport is not there, or the address is no IP literal.
        RendezvousError: ranks are missing (they are named), or the scheduler does not start.
        StopRequested: a rank was asked to stop meanwhile; raised on all.
    """
    transport = choose_transport(spec)
    device = DEVICE_OF[transport]
    # Where the compiler leaves its files about code that it cannot compile; else beside the user's.
    os.environ.setdefault("MS_OM_PATH", str(spec.folder))
    if device != "CPU":
        index = device_index(transport, spec.local_rank, os.environ)
        ms.set_device(device, index)
        _say(f"rank {spec.rank} on {spec.node} computes on {device} {index}")
    else:
        # A CPU's kernels run on the cores that issue them: queues between the two are threads that
        # spin while they wait for each other, for two fifths of four ranks' processor time.
        ms.runtime.launch_blocking()
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
    if not is_literal(spec.address):
        raise TransportError(
            f"MindSpore takes IP addresses only, but the address of {spec.node} is "
            f"{spec.address!r}; choose its interface: cluster.interface=eth0, say"
        )


def _host(spec: GroupSpec) -> tuple[Hub, Scheduler, dict[str, Any]]:
    """Rank 0's part."""
    token = secrets.token_hex(16)
    scheduler = scheduler_of(spec)
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
    if os.environ.pop(RANK_TABLE, None):
        _say(f"note: {RANK_TABLE} is not used; ranks meet in MindSpore's dynamic cluster")
    os.environ.update(variables(spec, transport, (host, port), os.environ))
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


def _say(sentence: str) -> None:
    print(sentence, flush=True)
