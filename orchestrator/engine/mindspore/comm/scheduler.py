"""MindSpore's scheduler process (MS_SCHED), which `msrun` would start: here a child of rank 0.

It may not be given port 0, and a busy port shows only after its time-out; so a port is kept for it,
and the child is watched until it really listens there. It imports MindSpore, which takes seconds,
and is therefore started before the ranks do.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from orchestrator.engine.api import GroupSpec
from orchestrator.engine.common.listening import keep_port
from orchestrator.errors import RendezvousError

SCRIPT = Path(__file__).with_name("scheduler_process.py")
PATIENCE = 2
"""It waits so many times as long as the ranks: it is there first, and they say who is missing."""

_started: dict[Path, Scheduler] = {}


def is_literal(address: str) -> bool:
    """Whether an address is an IP literal, which is all that MindSpore takes."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def ahead(spec: GroupSpec) -> None:
    """On rank 0 of several: start the scheduler, to import MindSpore while the ranks do."""
    if spec.rank == 0 and spec.size > 1 and is_literal(spec.address):
        _started[spec.folder] = Scheduler(spec.address, spec.size, spec.timeout_s)


def scheduler_of(spec: GroupSpec) -> Scheduler:
    """The one that was started ahead, or else a new one."""
    found = _started.pop(spec.folder, None)
    return found or Scheduler(spec.address, spec.size, spec.timeout_s)


class Scheduler:
    """The child process. It ends with rank 0, however rank 0 ends (see `scheduler_process`).

    Args:
        address: IP literal; MindSpore takes no host names.
        workers: how many ranks it waits for.
        timeout_s: how long it waits for them.

    Raises:
        RendezvousError: not our address.
    """

    def __init__(self, address: str, workers: int, timeout_s: float) -> None:
        self._address, self._workers, self._timeout_s = address, workers, timeout_s
        try:
            self._keeper = keep_port(address)
        except OSError as error:
            raise RendezvousError(
                f"rank 0 cannot listen at {address}: {error.strerror}; it must be an IP address of "
                f"this node (cluster.interface chooses it)"
            ) from error
        self.port = int(self._keeper.getsockname()[1])
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(os.getpid())],
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a share of the processor of its own while both import
        )

    def _environment(self) -> Mapping[str, str]:
        kept = {k: v for k, v in os.environ.items() if k != "MS_NODE_ID"}
        return {
            **kept,
            "MS_ROLE": "MS_SCHED",
            "MS_WORKER_NUM": str(self._workers),
            "MS_SCHED_HOST": self._address,
            "MS_SCHED_PORT": str(self.port),
            "MS_TOPO_TIMEOUT": str(max(1, round(PATIENCE * self._timeout_s))),
            "GLOG_v": os.environ.get("GLOG_v", "3"),  # noqa: SIM112  # its name
        }

    def ready(self) -> bool:
        """True once the child listens. Raises `RendezvousError` when it has ended."""
        if self.process.poll() is not None:
            raise RendezvousError(
                f"MindSpore's scheduler could not be started at {self._address}:{self.port}: it "
                f"ended with status {self.process.returncode}"
            )
        try:
            own = psutil.Process(self.process.pid).net_connections(kind="tcp")
        except psutil.NoSuchProcess:  # it has ended since
            return False
        return any(_listens(connection, self.port) for connection in own)

    def end(self) -> None:
        """End the child and collect it. Without this it would linger 5 s after the last worker."""
        with contextlib.suppress(ProcessLookupError):  # it ended in this moment
            self.process.kill()
        self.process.wait()
        self._keeper.close()


def _listens(connection: object, port: int) -> bool:
    local = getattr(connection, "laddr", None)
    return (
        getattr(connection, "status", "") == psutil.CONN_LISTEN
        and getattr(local, "port", None) == port
    )
