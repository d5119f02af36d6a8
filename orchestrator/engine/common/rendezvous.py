"""Building blocks of a rendezvous: verdicts, listening sockets, reserved ports, published files."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

from orchestrator.engine.api import GroupSpec
from orchestrator.errors import RanksMissing, RendezvousError, StopRequested, TransportError
from orchestrator.plan.plan_warnings import named_ranks
from orchestrator.rundir.files import write_atomically


def raise_for_verdict(spec: GroupSpec, verdict: dict[str, Any]) -> None:
    """Raise the error of rank 0's verdict, in the same words on all ranks; return if it is go."""
    kind = verdict["verdict"]
    if kind == "stop":
        raise StopRequested("the run was asked to stop while its ranks came together")
    if kind == "missing":
        raise RanksMissing(
            f"{named_ranks(verdict['ranks'])} of {spec.size} did not come within "
            f"{spec.timeout_s:g} s"
        )
    if kind == "transport":
        raise TransportError(str(verdict["message"]))
    if kind == "failed":
        raise RendezvousError(str(verdict["message"]))


def listen(address: str) -> socket.socket:
    """Return a socket that listens at `address`, on a port that the kernel chose. Raises
    `OSError`.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    return listener


def keep_port(address: str) -> socket.socket:
    """Reserve a port of this node with a bound socket, until that is closed, for a server that only
    gets its number: a program's store, MindSpore's scheduler.

    A free port that was found and released may be taken before it is used. This socket stays bound
    without listening: the kernel assigns its port to no other process, but lets a server bind it
    that sets SO_REUSEADDR, as stores and schedulers do. The port is reserved at every address of
    the node, since many servers listen at all of them.

    Raises:
        OSError: `address` is none of this node's, or all its ports are in use.
    """
    listen(address).close()
    every_family = socket.has_dualstack_ipv6()
    keeper = socket.socket(socket.AF_INET6 if every_family else socket.AF_INET)
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if every_family:
        keeper.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        keeper.bind(("", 0))
    except OSError:
        keeper.close()
        raise
    return keeper


# ------------------------------------------------------------------ Published files
# One rank publishes a file in the run folder and all others read it without loading the shared
# file system. Of each node only the first rank polls, ever more rarely; its neighbours ask it over
# an abstract socket. On its own node the publisher answers directly. Ranks that can ask no other
# (it has not begun, has ended, or a container hides it) poll themselves.


FIRST_S, OFTEN_S, RARE_S = 0.05, 0.75, 2.0
ALONE_AFTER_S = 0.2
ASK_S = 1.0
HERE, LIFE_S = b" ", 0.05


class Backoff:
    """Pauses that double: quick at first, then `OFTEN_S` apart, and a tenth of a long wait."""

    def __init__(self) -> None:
        self._pause, self._began = FIRST_S, time.monotonic()

    def next(self) -> float:
        """Return the next pause in seconds."""
        longest = min(max(OFTEN_S, (time.monotonic() - self._began) / 10), RARE_S)
        pause, self._pause = min(self._pause, longest), 2 * self._pause
        return pause


class Notice:
    """A JSON file that one rank publishes once or a few times.

    Args:
        node: the node's name; with the path it names the socket.
        first: whether this rank is the one of its node that is asked: its reader, or the publisher.
    """

    def __init__(self, path: Path, *, node: str, first: bool) -> None:
        self._path, self._began = path, time.monotonic()
        digest = hashlib.sha256(f"{os.getuid()} {node} {path.absolute()}".encode()).hexdigest()
        self._address = f"\0orchestrator-{digest[:32]}"
        self._relay = _Relay(self._address) if first else None
        self._looks, self._backoff = first, Backoff()
        self._alone_at = self._began + ALONE_AFTER_S

    def publish(self, content: Any) -> None:
        """Write it for other nodes, and answer those of this one."""
        text = json.dumps(content)
        write_atomically(self._path, text)
        if self._relay is not None:
            self._relay.tell(text)

    def wait(self) -> Any | None:
        """Poll the file, or ask the relay; return None, after a pause, if it is not there yet."""
        if not self._looks:
            return self._ask()
        found = self._look()
        if found is None:
            time.sleep(self._backoff.next())
        return found

    def _look(self) -> Any | None:
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        if self._relay is not None:
            self._relay.tell(text)
        return json.loads(text)

    def _ask(self) -> Any | None:
        """Ask the node's first rank, which answers as soon as it has the file, and meanwhile sends
        signs of life.
        """
        heard = b""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
                asking.settimeout(ASK_S)
                asking.connect(self._address)
                if _other_users(asking):
                    raise ConnectionRefusedError
                until = time.monotonic() + ASK_S
                while part := asking.recv(65536):
                    heard += part
                    if heard == HERE * len(heard) and time.monotonic() > until:
                        return None
                text = heard.lstrip(HERE)
                return json.loads(text) if text else None
        except TimeoutError:
            # It has no thread to answer: MindSpore's `init` waits for us with the interpreter held.
            return None if heard else self._look()
        except OSError:  # it is not there yet, or not any more, or never will be
            time.sleep(FIRST_S)
            now = time.monotonic()
            if now < self._alone_at:
                return None
            self._alone_at = now + min(now - self._began, RARE_S)
            return self._look()


def _other_users(connection: socket.socket) -> bool:
    """Return whether a process of another user holds the other end."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return user != os.getuid()


class _Relay:
    """Sends the text to the node's other ranks, once there is one. Lives as long as the process."""

    def __init__(self, address: str) -> None:
        self._text, self._known = b"", threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(address)
            self._socket.listen(socket.SOMAXCONN)
        except OSError:  # held by a forgotten process: the neighbours look for themselves
            self._socket.close()
            return
        threading.Thread(target=self._serve, name="notice", daemon=True).start()

    def tell(self, text: str) -> None:
        self._text = text.encode()
        self._known.set()

    def _serve(self) -> None:
        waiting: list[socket.socket] = []
        while True:
            known = self._known.is_set()
            for asked in [*waiting]:
                try:
                    asked.sendall(self._text if known else HERE)
                    answered = known
                except OSError:  # it gave up meanwhile
                    answered = True
                if answered:
                    asked.close()
                    waiting.remove(asked)
            self._socket.settimeout(None if known else LIFE_S)
            try:
                asked, _ = self._socket.accept()
            except TimeoutError:
                continue
            if _other_users(asked):
                asked.close()
            else:
                waiting.append(asked)
