"""Lines of JSON over TCP between the agents of one run, which authenticate each other.

The connecting agent first sends its index, signed with a secret in the private run folder. A
connection that sends anything else is closed and its data dropped.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar, cast

MOST_BYTES = 1 << 24  # a list of a million ranks
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Peer:
    """Address of a listening agent, its node's number, and how many agents the node had before."""

    address: str
    port: int
    node: int
    incarnation: int = 0

    @property
    def seniority(self) -> tuple[int, int]:
        """Return the key by which agents coordinate: a restarted agent comes last."""
        return self.incarnation, self.node


def sign(secret: str, node: int, to: tuple[int, int]) -> str:
    """Return the signature that proves that `node` can read the run folder.

    Args:
        to: seniority of the agent that it connects to. The agent that listens there may be a later
            one, to which the kernel gave the same port; that one is no more senior.
    """
    signed = f"{int(node)} {to}"
    return hmac.new(secret.encode(), signed.encode(), hashlib.sha256).hexdigest()


def line_of(message: Mapping[str, Any]) -> bytes:
    """Return a message as a link sends it."""
    return json.dumps(message).encode() + b"\n"


@dataclass(slots=True, eq=False)
class Link:
    """Connection to an agent.

    Attributes:
        peer_index: of its node (an agent) or its rank (a worker); None before it is authenticated.
        heard: when the last data came, by its owner's clock.
        unsent: bytes that the kernel has not taken yet. They go with the next message, a heartbeat
            at the latest: a peer that does not read must not delay the messages to others.
    """

    socket: socket.socket
    peer_index: int | None = None
    heard: float = 0.0
    unread: bytes = b""
    unsent: bytes = b""

    def __post_init__(self) -> None:
        self.socket.setblocking(False)

    def send(self, **message: Any) -> bool:
        """Send a message without waiting; return False if the link is broken, or too far behind."""
        return self.send_line(line_of(message))

    def send_line(self, line: bytes) -> bool:
        """Send what `line_of` gave, which is computed once for many links."""
        if len(self.unsent) > MOST_BYTES:
            return False
        self.unsent += line
        return self.flush()

    def flush(self) -> bool:
        """Send what the kernel takes now; return False if the link is broken."""
        try:
            while self.unsent:
                self.unsent = self.unsent[self.socket.send(self.unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """Return complete messages that came; None if the peer closed, or sent garbage."""
        try:
            content = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not content:
            return None
        *lines, self.unread = (self.unread + content).split(b"\n")
        most = 1 << 16 if self.peer_index is None else MOST_BYTES
        if max(map(len, (*lines, self.unread))) > most:
            return None
        try:  # in one call, since thousands of workers may end together
            messages = json.loads((b"[" + b",".join(lines) + b"]").decode())
        except (ValueError, RecursionError):
            return None
        is_valid = len(messages) == len(lines) and all(
            isinstance(message, dict) for message in messages
        )
        return messages if is_valid else None

    def close(self) -> None:
        self.socket.close()


def connect(peer: Peer, *, secret: str, node: int) -> Link:
    """Connect the agent of `node` to another one.

    Raises:
        ConnectionRefusedError: nothing listens there any more.
        OSError: it cannot be reached.
    """
    to = (peer.address, peer.port)
    link = Link(socket.create_connection(to, timeout=0.5), peer_index=peer.node)
    if not link.send(node=node, sign=sign(secret, node, peer.seniority)):
        link.close()
        raise ConnectionResetError
    return link


def authenticate(message: dict[str, Any], *, secret: str, me: tuple[int, int]) -> int | None:
    """Return the node that a first message to the agent of this seniority authenticates.

    None if it does not.
    """
    node, signature = message.get("node"), message.get("sign")
    if not isinstance(node, int) or not isinstance(signature, str):
        return None
    signature_bytes = signature.encode(errors="replace")  # JSON may hold half of a surrogate pair
    return node if hmac.compare_digest(signature_bytes, sign(secret, node, me).encode()) else None


ANSWER = line_of({})
"""Of an agent to a process that asks, as its own node, whether it lives (`probe_ports`)."""


class Port(Enum):
    """State of a peer's port: of one that is open, the peer's process lives."""

    OPEN = "open"
    CLOSED = "closed"
    SILENT = "silent"  # its node is down, stopped, or cut off


def probe_ports(
    peers: Mapping[Key, Peer], timeout_s: float, secret: str | None = None
) -> dict[Key, Port]:
    """Return the states of these peers' ports, by key. All are probed at once, without a thread.

    Args:
        secret: of the attempt. With it a port is open only if its agent answers, and closed if
            another process does, to which the kernel has given the port since.
    """
    states = dict.fromkeys(peers, Port.SILENT)
    until = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as opened:
        for key, peer in peers.items():
            try:
                [(family, kind, *_, address), *_] = socket.getaddrinfo(
                    peer.address, peer.port, type=socket.SOCK_STREAM
                )
                probe = opened.enter_context(socket.socket(family, kind))
                probe.setblocking(False)
                error = probe.connect_ex(address)
            except OSError:  # an unknown name, no descriptor left, or no route
                continue
            if error == errno.EINPROGRESS or (not error and secret is not None):
                selector.register(probe, selectors.EVENT_WRITE, key)
            else:
                states[key] = _port_state(error)
        in_time = True
        while selector.get_map() and in_time:
            # At the end it looks once more: peers may have answered while this process had no core.
            in_time = (left_s := until - time.monotonic()) > 0
            for ready, _ in selector.select(max(0.0, left_s)):
                probe, peer = cast("socket.socket", ready.fileobj), peers[ready.data]
                selector.unregister(probe)
                if ready.events & selectors.EVENT_READ:
                    states[ready.data] = _answer_of(probe)
                    continue
                error = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                states[ready.data] = _port_state(error)
                if not error and secret is not None:
                    states[ready.data] = Port.SILENT  # until it answers
                    with contextlib.suppress(OSError):  # closed already, as reading it will show
                        probe.send(line_of(_ask(peer, secret)))
                    selector.register(probe, selectors.EVENT_READ, ready.data)
    return states


def _ask(peer: Peer, secret: str) -> dict[str, Any]:
    """Return the message that only this agent answers: its own node's, which no agent sends."""
    return {"node": peer.node, "sign": sign(secret, peer.node, peer.seniority)}


def _answer_of(probe: socket.socket) -> Port:
    """Return whether the agent has answered, or another process, or none of both any more."""
    try:
        return Port.OPEN if probe.recv(64) == ANSWER else Port.CLOSED
    except OSError:
        return Port.CLOSED


def _port_state(error: int) -> Port:
    if error == errno.ECONNREFUSED:
        return Port.CLOSED
    return Port.SILENT if error else Port.OPEN
