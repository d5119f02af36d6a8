"""Rendezvous of MindSpore ranks, and its scheduler process. No framework is imported here.

MindSpore's own dynamic cluster reports nothing until its timeout and never which rank is missing,
so ranks meet in the run folder first. A rank that dies later is the agents' concern: they end the
others, which would wait in a collective until it times out.
"""

from __future__ import annotations

import ipaddress
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from orchestrator.engine.api import GroupSpec
from orchestrator.engine.common.rendezvous import (
    backoff,
    keep_port,
    publish,
    raise_for_verdict,
    read_published,
)
from orchestrator.engine.common.waiting import PatientDeadline
from orchestrator.errors import (
    PeerLost,
    RanksMissing,
    RendezvousError,
    StopRequested,
)

# ------------------------------------------------------------------ Scheduler
# MindSpore's scheduler process (MS_SCHED), which `msrun` would start, is a child of rank 0 here. It
# cannot be given port 0, and a busy port shows only after its timeout; so a port is reserved
# for it, and the child is watched until it listens there. It imports MindSpore, which takes
# seconds, and therefore starts before the ranks do.


_started: dict[Path, Scheduler] = {}


def is_literal(address: str) -> bool:
    """Return whether an address is an IP literal, which is all that MindSpore takes."""
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
    """Return the scheduler that was started ahead, or a new one."""
    scheduler = _started.pop(spec.folder, None)
    return scheduler or Scheduler(spec.address, spec.size, spec.timeout_s)


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
        self._address, self._ending = address, False
        try:
            self._keeper = keep_port(address)
        except OSError as error:
            raise RendezvousError(
                f"rank 0 cannot listen at {address}: {error.strerror}; it must be an IP address of "
                f"this node (cluster.interface chooses it)"
            ) from error
        self.port = int(self._keeper.getsockname()[1])
        environment = {
            "GLOG_v": "3",
            **os.environ,
            "MS_ROLE": "MS_SCHED",
            "MS_WORKER_NUM": str(workers),
            "MS_SCHED_HOST": address,
            "MS_SCHED_PORT": str(self.port),
            # Twice that of the ranks: it is there first, and they say who is missing.
            "MS_TOPO_TIMEOUT": str(max(1, round(2 * timeout_s))),
        }
        environment.pop("MS_NODE_ID", None)
        script = Path(__file__).with_name("scheduler_process.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(os.getpid())],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a share of the processor of its own while both import
        )

    def ready(self) -> bool:
        """Return True once the child listens. Raises `RendezvousError` when it has ended."""
        if self.process.poll() is not None:
            raise RendezvousError(
                f"MindSpore's scheduler could not be started at {self._address}:{self.port}: it "
                f"ended with status {self.process.returncode}"
            )
        try:
            own = psutil.Process(self.process.pid).net_connections(kind="tcp")
        except psutil.NoSuchProcess:  # it has ended since
            return False
        return any(
            connection.status == psutil.CONN_LISTEN
            and getattr(connection.laddr, "port", None) == self.port
            for connection in own
        )

    def watch(self) -> None:
        """End this process from now on if the child ends: the main thread may wait in a collective,
        which would not end.
        """
        threading.Thread(target=self._watch, name="scheduler", daemon=True).start()

    def _watch(self) -> None:
        status = self.process.wait()
        if self._ending:
            return
        print(  # `agent.root_cause` reads the log's last line
            f"error: MindSpore's scheduler (process {self.process.pid}, a child of rank 0) ended "
            f"with status {status}; ranks cannot talk without it",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    def end(self) -> None:
        """End the child and collect it. Without this it would linger 5 s after the last worker."""
        self._ending = True
        self.process.kill()
        self.process.wait()
        self._keeper.close()


# ------------------------------------------------------------------ Rendezvous
# Every rank leaves an arrival file; rank 0 alone decides (go, stop or missing) and publishes the
# verdict; the others wait for it.


Endpoint = dict[str, Any]


def _folder(spec: GroupSpec) -> Path:
    return spec.folder / f"mindspore-{spec.generation:03d}"


def arrival_file(spec: GroupSpec, rank: int) -> Path:
    """Return the arrival file of `rank`."""
    return _folder(spec) / f"arrived-{rank:05d}.json"


def _write_arrival(spec: GroupSpec, device: str) -> None:
    _folder(spec).mkdir(mode=0o700, parents=True, exist_ok=True)
    arrival = {"node": spec.node, "address": spec.address, "device": device}
    publish(arrival_file(spec, spec.rank), arrival)


def _describe_shared_device(spec: GroupSpec) -> str:
    """Return a sentence about two ranks that have arrived with the same device; "" if none have."""
    owners: dict[tuple[str, str], int] = {}
    for rank in range(spec.size):
        arrival = read_published(arrival_file(spec, rank)) or {}
        device = arrival.get("node", ""), arrival.get("device", "")
        if device[1] and (first := owners.setdefault(device, rank)) != rank:
            return (
                f"ranks {first} and {rank} on {device[0]} share {device[1]}, and each rank needs a "
                "device of its own; use fewer ranks a node (cluster.ranks_per_node), or "
                "transport=mccl, which runs on CPUs"
            )
    return ""


def _verdict_file(spec: GroupSpec) -> Path:
    return _folder(spec) / "verdict.json"


def decide(spec: GroupSpec, ready: Callable[[], Endpoint | None], device: str = "") -> Endpoint:
    """Wait for all ranks, a stop or the timeout, and publish the verdict. For rank 0.

    Args:
        ready: asked until it gives what the others need to connect. It may raise `RendezvousError`.
        device: of this rank, unique on its node; "" on a CPU.

    Returns:
        The verdict, which is "go".

    Raises:
        StopRequested, RendezvousError, TransportError: on all ranks alike.
    """
    _write_arrival(spec, device)
    pauses, deadline = backoff(), PatientDeadline(spec.timeout_s)
    while (verdict := _verdict(spec, ready, late=deadline.passed)) is None:
        time.sleep(next(pauses))
    if verdict["verdict"] == "go" and device and (shared := _describe_shared_device(spec)):
        verdict = {"verdict": "transport", "message": shared}
    publish(_verdict_file(spec), verdict)
    raise_for_verdict(spec, verdict)
    return verdict


def _verdict(
    spec: GroupSpec, ready: Callable[[], Endpoint | None], *, late: bool
) -> Endpoint | None:
    """Return the verdict on what is known now; None while it is open, which it is not if `late`."""
    if spec.stop_requested() or (_folder(spec) / "stop").exists():
        return {"verdict": "stop"}
    arrived = {int(path.stem.rpartition("-")[2]) for path in _folder(spec).glob("arrived-*.json")}
    missing = sorted(set(range(spec.size)) - arrived)
    try:
        endpoint = ready()
    except RendezvousError as error:
        return {"verdict": "failed", "message": str(error)}
    if endpoint is not None and not missing:
        return {"verdict": "go", **endpoint}
    if late and missing:
        return {"verdict": "missing", "ranks": missing}
    if late:
        message = f"MindSpore's scheduler did not start within {spec.timeout_s:g} s"
        return {"verdict": "failed", "message": message}
    return None


def await_verdict(spec: GroupSpec, device: str = "") -> Endpoint:
    """Arrive, and wait for rank 0's verdict; raise its error. For the other ranks.

    Args:
        device: as for `decide`.
    """
    _write_arrival(spec, device)
    pauses, deadline = backoff(), PatientDeadline(spec.timeout_s)
    while (verdict := read_published(_verdict_file(spec))) is None:
        if spec.stop_requested():
            (_folder(spec) / "stop").touch()
            # Written before looking: either rank 0 sees the stop, or it has arrived and is seen.
            if not arrival_file(spec, 0).exists():
                raise StopRequested(f"rank {spec.rank} was asked to stop while waiting for rank 0")
        late = deadline.over_s
        if late > 0 and not arrival_file(spec, 0).exists():
            raise RanksMissing(f"rank 0 of {spec.size} did not come within {spec.timeout_s:g} s")
        if late > 5.0:  # more than rank 0, which decides
            raise RendezvousError(
                f"rank {spec.rank} on {spec.node} waited {spec.timeout_s:g} s for a verdict of "
                f"rank 0, which came but does not answer"
            )
        time.sleep(next(pauses))
    raise_for_verdict(spec, verdict)
    return verdict


def leave_together(spec: GroupSpec) -> None:
    """Return once every rank has called: a rank that ended earlier could leave the others without
    its part of the last collective, which MCCL sends in the background. Collective.

    Raises:
        PeerLost: some ranks do not call within the time-out of a collective.
    """
    folder, pauses = _folder(spec), backoff()
    deadline = PatientDeadline(spec.collective_timeout_s)
    publish(folder / f"left-{spec.rank:05d}.json", {})
    all_left = folder / "all-left.json"
    while read_published(all_left) is None:
        if spec.rank == 0 and len(list(folder.glob("left-*.json"))) == spec.size:
            publish(all_left, {})
        elif deadline.passed:
            raise PeerLost(
                f"rank {spec.rank}: a rank did not leave the group within "
                f"{spec.collective_timeout_s:g} s"
            )
        else:
            time.sleep(next(pauses))
