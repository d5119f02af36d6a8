"""Who is still there: one TCP connection from every rank to rank 0, and the scheduler's process.

MindSpore notices a dead peer after a collective's time-out, cannot tell it from a slow one, and
then has every survivor end itself. A connection tells at once: the kernel closes it when a process
dies, however it dies, and keeps it while the process is merely slow. A node that vanishes without
a word is noticed by TCP's keep-alive. No framework is imported here.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable

from orchestrator.errors import OrchestratorError, PeerLost, RunFailed

KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_COUNT = 4, 2, 4
GRACE_S = 3.0
"""How long the main thread has to take notice; in a compiled graph it may be stuck for ever."""

Node = str


def _keep_alive(link: socket.socket) -> None:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Watch:
    """What both sides share: the first loss, and what becomes of a main thread that cannot see
    it.
    """

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
        threading.Thread(target=self._insist, daemon=True).start()

    def _insist(self) -> None:
        """End the process if the main thread is stuck in the framework and cannot take notice.

        The log's last line is then all that says why; `agent.root_cause` reads it there.
        """
        if not self._noticed.wait(GRACE_S) and not self._closed:
            print(f"error: {self._lost}", file=sys.stderr, flush=True)
            os._exit(1)


class Hub(Watch):
    """Rank 0's side. Accepts the others, and tells all of them when one is gone.

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
            self._tell(
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
        self._selector.register(link, selectors.EVENT_READ, lambda: self._hear(link))

    def _hear(self, link: socket.socket) -> None:
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
            self._tell(_gone(*who), who)

    def _tell(self, error: OrchestratorError, who: tuple[int, Node] | None) -> None:
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


class Link(Watch):
    """Every other rank's side."""

    def __init__(self, endpoint: tuple[str, int], token: str, rank: int, node: Node) -> None:
        super().__init__()
        self._socket = socket.create_connection(endpoint, timeout=30.0)
        self._socket.settimeout(None)
        _keep_alive(self._socket)
        self._say({"hello": rank, "node": node, "token": token})
        self._thread = threading.Thread(target=self._listen, name="liveness", daemon=True)
        self._thread.start()

    def _say(self, message: dict[str, object]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _listen(self) -> None:
        with self._socket:
            self._hear()

    def _hear(self) -> None:
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
                    _gone(*message["lost"]) if message["lost"] else PeerLost(message["because"])
                )
            if not content:
                self._lose(PeerLost("rank 0 went away: its connection was closed"))
                return

    def close(self) -> None:
        """Say goodbye: what follows is the end of this rank, not a loss."""
        self._closed = True
        with contextlib.suppress(OSError):  # rank 0 is gone, and has nobody to tell
            self._say({"bye": 0})
            self._socket.shutdown(socket.SHUT_WR)
        self._thread.join(2.0)


def _gone(rank: int, node: Node) -> PeerLost:
    return PeerLost(f"rank {rank} on {node} went away: its connection was closed")
