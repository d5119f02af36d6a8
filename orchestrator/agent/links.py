"""Lines of JSON over TCP between the agents of one run, which authenticate each other.

The connecting agent first sends its index, signed with a secret in the private run folder. A
connection that sends anything else is closed and its data dropped.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

MOST_BYTES = 1 << 24  # a list of a million ranks
SEND_S = 1.0


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


@dataclass(slots=True, eq=False)
class Link:
    """Connection to an agent.

    Attributes:
        peer_index: of its node (an agent) or its rank (a worker); None before it is authenticated.
        heard: when the last data came, by its owner's clock.
    """

    socket: socket.socket
    peer_index: int | None = None
    heard: float = 0.0
    unread: bytes = b""

    def send(self, **message: Any) -> bool:
        """Send a message; return whether the kernel accepted it."""
        try:
            self.socket.settimeout(SEND_S)
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """Return complete messages that came; None if the peer closed, or sent garbage."""
        try:
            content = self.socket.recv(1 << 16)
        except OSError:
            return None
        if not content:
            return None
        *lines, self.unread = (self.unread + content).split(b"\n")
        most = 1 << 16 if self.peer_index is None else MOST_BYTES
        if max(map(len, (*lines, self.unread))) > most:
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            return None
        return messages if all(isinstance(one, dict) for one in messages) else None

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
    given = signature.encode(errors="replace")  # JSON may hold half of a surrogate pair
    return node if hmac.compare_digest(given, sign(secret, node, me).encode()) else None


def closed_ports(peers: Mapping[int, Peer], timeout_s: float) -> set[int]:
    """Return the keys of peers at whose address nothing listens any more, probing all at once."""
    if not peers:
        return set()
    with ThreadPoolExecutor(max_workers=min(64, len(peers))) as pool:  # ended before any fork
        refusals = pool.map(
            lambda peer: is_port_closed(peer.address, peer.port, timeout_s), peers.values()
        )
        return {key for key, refused in zip(peers, refusals, strict=True) if refused}


def is_port_closed(address: str, port: int, timeout_s: float, *, unknown: bool = False) -> bool:
    """Return whether nothing listens there any more.

    Args:
        unknown: the result for a node that does not answer: it is silent, or cut off.
    """
    try:
        socket.create_connection((address, port), timeout=timeout_s).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return unknown
    return False
