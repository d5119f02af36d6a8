"""Rendezvous and liveness of MindSpore ranks. No framework is imported here.

MindSpore's own dynamic cluster reports nothing until its timeout and never which rank is missing,
so ranks meet in the run folder first, and each keeps a TCP connection to rank 0.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from orchestrator.engine.api import GroupSpec
from orchestrator.engine.common.rendezvous import Backoff, Notice, keep_port
from orchestrator.errors import (
    OrchestratorError,
    PeerLost,
    RanksMissing,
    RendezvousError,
    RunFailed,
    StopRequested,
)
from orchestrator.plan.plan_warnings import named_ranks
from orchestrator.rundir.files import write_atomically

KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_COUNT = 4, 2, 4
GRACE_S = 3.0
"""Time for the main thread to see a loss; in a compiled graph it may be stuck forever."""

Node = str


def _keep_alive(link: socket.socket) -> None:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class PeerWatch:
    """Base of both sides: the first loss, and the end of a process whose main thread is stuck."""

    def __init__(self) -> None:
        self._lost: OrchestratorError | None = None
        self._closed = False
        self._noticed = threading.Event()
        self.changed = threading.Event()

    def check(self) -> None:
        """Raise what was lost, if anything was: `PeerLost`, or `RunFailed` for the scheduler."""
        if self._lost is not None:
            self._noticed.set()
            raise self._lost

    def _lose(self, error: OrchestratorError) -> None:
        if self._closed or self._lost is not None:
            return
        self._lost = error
        self.changed.set()
        threading.Thread(target=self._exit_if_stuck, daemon=True).start()

    def _exit_if_stuck(self) -> None:
        """End the process if the main thread is stuck in the framework and cannot take notice.

        The log's last line is then all that says why; `agent.root_cause` reads it there.
        """
        if not self._noticed.wait(GRACE_S) and not self._closed:
            print(f"error: {self._lost}", file=sys.stderr, flush=True)
            os._exit(1)


class LivenessServer(PeerWatch):
    """Rank 0's side. Accepts the others, and reports a lost rank to all of them.

    Args:
        address: where to listen.
        nodes: node name by rank, for messages; filled as ranks say hello.
    """

    def __init__(self, address: str, token: str) -> None:
        super().__init__()
        self._token = token
        self._listener = socket.create_server((address, 0), backlog=1024)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._links: dict[socket.socket, tuple[int, Node] | None] = {}
        self._unread: dict[socket.socket, bytes] = {}
        self.endpoint = self._listener.getsockname()[:2]
        self._child: Callable[[], int | None] | None = None
        self._thread = threading.Thread(target=self._serve, name="liveness", daemon=True)
        self._thread.start()

    def watch_child(self, pid: int, status: Callable[[], int | None]) -> None:
        """Watch the scheduler as well. `status` collects it and gives its exit status."""
        descriptor = os.pidfd_open(pid)

        def ended() -> None:
            self._selector.unregister(descriptor)
            os.close(descriptor)
            self._report_loss(
                RunFailed(
                    f"MindSpore's scheduler (process {pid}, a child of rank 0) ended with status "
                    f"{status()}; ranks cannot talk without it"
                ),
                None,
            )

        self._selector.register(descriptor, selectors.EVENT_READ, ended)

    def _serve(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(1.0):
                if not self._closed:
                    key.data()

    def _accept(self) -> None:
        link, _ = self._listener.accept()
        _keep_alive(link)
        self._links[link], self._unread[link] = None, b""
        self._selector.register(link, selectors.EVENT_READ, lambda: self._receive(link))

    def _receive(self, link: socket.socket) -> None:
        try:
            content = link.recv(4096)
        except OSError:
            content = b""
        *lines, self._unread[link] = (self._unread[link] + content).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "hello" in message and message["token"] == self._token:
                self._links[link] = (int(message["hello"]), str(message["node"]))
            elif "bye" in message:
                self._links[link] = None
        if content:
            return
        who = self._links.pop(link)
        self._selector.unregister(link)
        link.close()
        if who is not None:
            self._report_loss(_peer_lost(*who), who)

    def _report_loss(self, error: OrchestratorError, who: tuple[int, Node] | None) -> None:
        news = {"lost": who, "because": str(error)}
        for link in self._links:
            with contextlib.suppress(OSError):  # it is on its way out itself
                link.sendall(json.dumps(news).encode() + b"\n")
        self._lose(error)

    def close(self, wait_s: float = 5.0) -> None:
        """Stay until every rank has said goodbye, so that none takes our end for a loss."""
        until = time.monotonic() + wait_s
        while time.monotonic() < until and any(self._links.values()) and self._lost is None:
            time.sleep(0.005)
        self._closed = True
        with contextlib.suppress(OSError):  # the thread's next look at `_closed`, made now
            socket.create_connection(self.endpoint, timeout=1.0).close()
        self._thread.join(2.0)
        for link in self._links:
            with contextlib.suppress(OSError):
                link.sendall(b'{"bye": 0}\n')
            link.close()
        self._listener.close()
        self._selector.close()


class LivenessClient(PeerWatch):
    """Every other rank's side."""

    def __init__(self, endpoint: tuple[str, int], token: str, rank: int, node: Node) -> None:
        super().__init__()
        self._socket = socket.create_connection(endpoint, timeout=30.0)
        self._socket.settimeout(None)
        _keep_alive(self._socket)
        self._send({"hello": rank, "node": node, "token": token})
        self._thread = threading.Thread(target=self._listen, name="liveness", daemon=True)
        self._thread.start()

    def _send(self, message: dict[str, object]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _listen(self) -> None:
        with self._socket:
            self._receive()

    def _receive(self) -> None:
        unread = b""
        while True:
            try:
                content = self._socket.recv(4096)
            except OSError:
                content = b""
            *lines, unread = (unread + content).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "bye" in message:
                    return
                self._lose(
                    _peer_lost(*message["lost"])
                    if message["lost"]
                    else PeerLost(message["because"])
                )
            if not content:
                self._lose(PeerLost("rank 0 went away: its connection was closed"))
                return

    def close(self) -> None:
        """Say goodbye: what follows is the end of this rank, not a loss."""
        self._closed = True
        with contextlib.suppress(OSError):  # rank 0 is gone
            self._send({"bye": 0})
            self._socket.shutdown(socket.SHUT_WR)
        self._thread.join(2.0)


def _peer_lost(rank: int, node: Node) -> PeerLost:
    return PeerLost(f"rank {rank} on {node} went away: its connection was closed")


# ------------------------------------------------------------------
# MindSpore's scheduler process (MS_SCHED), which `msrun` would start: here a child of rank 0
# It cannot be given port 0, and a busy port shows only after its timeout; so a port is reserved
# for it, and the child is watched until it listens there. It imports MindSpore, which takes
# seconds, and therefore starts before the ranks do.


SCRIPT = Path(__file__).with_name("scheduler_process.py")
PATIENCE = 2
"""It waits so many times as long as the ranks: it is there first, and they say who is missing."""

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


# ------------------------------------------------------------------ Rendezvous
# Every rank leaves an arrival file; rank 0 alone decides (go, stop or missing) and publishes the
# verdict; the others wait for it.


LINGER_S = 5.0
"""How much longer the others wait than rank 0, which decides."""

Endpoint = dict[str, Any]


def _folder(spec: GroupSpec) -> Path:
    return spec.folder / f"mindspore-{spec.generation:03d}"


def arrival_file(spec: GroupSpec, rank: int) -> Path:
    """Return the arrival file of `rank`."""
    return _folder(spec) / f"arrived-{rank:05d}.json"


def _write_arrival(spec: GroupSpec) -> None:
    _folder(spec).mkdir(mode=0o700, parents=True, exist_ok=True)
    note = {"node": spec.node, "address": spec.address}
    write_atomically(arrival_file(spec, spec.rank), json.dumps(note))


def _notice(spec: GroupSpec) -> Notice:
    """Return the published file of the verdict."""
    path = _folder(spec) / "verdict.json"
    return Notice(path, node=spec.node, first=spec.local_rank == 0)


def _arrived_ranks(spec: GroupSpec) -> set[int]:
    return {int(path.stem.rpartition("-")[2]) for path in _folder(spec).glob("arrived-*.json")}


def _refusal(spec: GroupSpec, verdict: Endpoint) -> Exception | None:
    if verdict["verdict"] == "stop":
        return StopRequested("the run was asked to stop while its ranks came together")
    if verdict["verdict"] == "missing":
        return RanksMissing(
            f"{named_ranks(verdict['ranks'])} of {spec.size} did not come within "
            f"{spec.timeout_s:g} s"
        )
    if verdict["verdict"] == "failed":
        return RendezvousError(str(verdict["message"]))
    return None


def decide(spec: GroupSpec, ready: Callable[[], Endpoint | None]) -> Endpoint:
    """Wait for all ranks, a stop or the timeout, and publish the verdict. For rank 0.

    Args:
        ready: asked until it gives what the others need to connect. It may raise `RendezvousError`.

    Returns:
        The verdict, which is "go".

    Raises:
        StopRequested, RendezvousError: on all ranks alike.
    """
    _write_arrival(spec)
    until = time.monotonic() + spec.timeout_s
    notice = _notice(spec)
    endpoint: Endpoint | None = None
    verdict: Endpoint
    backoff = Backoff()
    while True:
        there = _arrived_ranks(spec)
        if spec.stop_requested() or (_folder(spec) / "stop").exists():
            verdict = {"verdict": "stop"}
            break
        try:
            endpoint = endpoint or ready()
        except RendezvousError as error:
            verdict = {"verdict": "failed", "message": str(error)}
            break
        if endpoint is not None and len(there) == spec.size:
            verdict = {"verdict": "go", **endpoint}
            break
        if time.monotonic() > until:
            missing = sorted(set(range(spec.size)) - there)
            verdict = {"verdict": "missing", "ranks": missing}
            if not missing:
                message = f"MindSpore's scheduler did not start within {spec.timeout_s:g} s"
                verdict = {"verdict": "failed", "message": message}
            break
        time.sleep(backoff.next())
    notice.publish(verdict)
    refusal = _refusal(spec, verdict)
    if refusal is not None:
        raise refusal
    return verdict


def await_verdict(spec: GroupSpec) -> Endpoint:
    """Arrive, and wait for rank 0's verdict; raise its error. For the other ranks."""
    _write_arrival(spec)
    until = time.monotonic() + spec.timeout_s
    notice = _notice(spec)
    while (verdict := notice.wait()) is None:
        if spec.stop_requested():
            (_folder(spec) / "stop").touch()
            # Written before looking: either rank 0 sees the stop, or it has arrived and is seen.
            if not arrival_file(spec, 0).exists():
                raise StopRequested(f"rank {spec.rank} was asked to stop while waiting for rank 0")
        late = time.monotonic() - until
        if late > 0 and not arrival_file(spec, 0).exists():
            raise RanksMissing(f"rank 0 of {spec.size} did not come within {spec.timeout_s:g} s")
        if late > LINGER_S:
            raise RendezvousError(
                f"rank {spec.rank} on {spec.node} waited {spec.timeout_s:g} s for a verdict of "
                f"rank 0, which came but does not answer"
            )
    refusal = _refusal(spec, verdict)
    if refusal is not None:
        raise refusal
    return verdict
