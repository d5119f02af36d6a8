"""Where a program's ranks meet: a port of the first node, told through the run folder.

torchrun would look for a free port and let go of it, and another run may take it before the program
does. Here it is kept for as long as the program runs (`listening.keep_port`).
"""

from __future__ import annotations

import importlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.engine.common.rendezvous import Notice, keep_port
from orchestrator.errors import RanksMissing, RendezvousError, StopRequested
from orchestrator.lifecycle.topology import Topology


@dataclass(slots=True)
class MeetingPlace:
    """An address and a port; on rank 0 what keeps the port."""

    address: str
    port: int
    keeper: socket.socket | None = None
    scheduler: Any = field(default=None)

    def close(self) -> None:
        if self.keeper is not None:
            self.keeper.close()
        if self.scheduler is not None:
            self.scheduler.end()


def host(path: Path, topology: Topology, style: str, timeout_s: float) -> MeetingPlace:
    """On rank 0: find the port, publish it at `path`. Raises `RendezvousError`: not our address."""
    notice = Notice(path, node=topology.node, first=True)
    if style == "mindspore":
        engine = importlib.import_module("orchestrator.engine.mindspore.rendezvous")
        scheduler = engine.Scheduler(topology.address, topology.size, timeout_s)
        place = MeetingPlace(topology.address, scheduler.port, scheduler=scheduler)
    else:
        try:
            keeper = keep_port(topology.address)
        except OSError as error:
            raise RendezvousError(
                f"rank 0 cannot use its address {topology.address}: {error.strerror}; it must be "
                f"an address of this node (cluster.interface chooses it)"
            ) from error
        place = MeetingPlace(topology.address, int(keeper.getsockname()[1]), keeper=keeper)
    notice.publish({"address": place.address, "port": place.port})
    return place


def find(
    path: Path, topology: Topology, timeout_s: float, stopped: Callable[[], bool]
) -> MeetingPlace:
    """On other ranks: wait until rank 0 has published it.

    Raises:
        RanksMissing: it has not within `timeout_s`.
        StopRequested: asked to stop meanwhile.
    """
    notice = Notice(path, node=topology.node, first=topology.local_rank == 0)
    until = time.monotonic() + timeout_s
    while (told := notice.wait()) is None:
        if stopped():
            raise StopRequested("asked to stop before the program began")
        if time.monotonic() > until:
            raise RanksMissing(
                f"rank 0 did not begin within {timeout_s:g} s (cluster.rendezvous_timeout_s)"
            )
    return MeetingPlace(str(told["address"]), int(told["port"]))
