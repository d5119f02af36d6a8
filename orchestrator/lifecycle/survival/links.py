"""Lines of JSON over TCP between ranks of one run, which prove to each other that they are.

Who connects says first which rank it is, signed with a secret that stands in the private run
folder. What says anything else is closed, and nothing of it is kept.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

HELLO_BYTES = 1 << 16
MOST_BYTES = 1 << 24  # a list of a million ranks
CONNECT_S = 0.5
SEND_S = 1.0
_WORD_BITS, _WORDS = 32, 4  # of an IPv6 address


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a rank listens, on which node (its number in the attempt), and at which port there its
    witness is asked (`witness.py`; 0: it has none).
    """

    address: str
    port: int
    node: int
    witness: int = 0

    def as_numbers(self) -> list[float]:
        """As numbers that a float64 carries.

        >>> Peer.of(Peer("127.0.1.2", 80, 3, 81).as_numbers())
        Peer(address='127.0.1.2', port=80, node=3, witness=81)
        """
        ip = ipaddress.ip_address(self.address)
        words = [int(ip) >> (_WORD_BITS * n) & (2**_WORD_BITS - 1) for n in range(_WORDS)]
        return list(map(float, (ip.version, *words, self.port, self.node, self.witness)))

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Peer:
        """The inverse of `as_numbers`."""
        version, *words, port, node, witness = map(int, numbers)
        number = sum(word << (_WORD_BITS * n) for n, word in enumerate(words))
        kind = ipaddress.IPv4Address if version == 4 else ipaddress.IPv6Address
        return cls(str(kind(number)), port, node, witness)


def sign(secret: str, rank: int, to: int, joins: Sequence[float] = ()) -> str:
    """What shows that `rank`, who speaks to `to`, may read the run folder; a newcomer says where it
    listens.
    """
    said = " ".join(map(str, map(int, (rank, to, *joins))))
    return hmac.new(secret.encode(), said.encode(), hashlib.sha256).hexdigest()


@dataclass(slots=True, eq=False)
class Link:
    """One connection. `rank`: whose, once that is known. `heard`: when, by the monotonic clock;
    `answered`: whether anything was heard at all.
    """

    socket: socket.socket
    rank: int | None = None
    heard: float = field(default_factory=time.monotonic)
    unread: bytes = b""
    answered: bool = False

    def send(self, **message: Any) -> bool:
        """Whether it could be handed to the kernel."""
        try:
            self.socket.settimeout(SEND_S)
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """Whole messages that have come; None when the other end is closed, or sends garbage."""
        try:
            content = self.socket.recv(1 << 16)
        except OSError:
            return None
        if not content:
            return None
        self.heard, self.answered = time.monotonic(), True
        *lines, self.unread = (self.unread + content).split(b"\n")
        most = HELLO_BYTES if self.rank is None else MOST_BYTES
        if max(map(len, (*lines, self.unread))) > most:
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            return None
        return messages if all(isinstance(one, dict) for one in messages) else None

    def close(self) -> None:
        self.socket.close()


def connect(peer: Peer, *, secret: str, rank: int, to: int, joins: Sequence[float] = ()) -> Link:
    """Follow rank `to`, or ask it to be let in. Raises `ConnectionRefusedError` where nobody
    listens any more, another `OSError` where it cannot be reached.
    """
    link = Link(socket.create_connection((peer.address, peer.port), timeout=CONNECT_S), rank=to)
    more = {"joins": list(joins)} if joins else {}
    if not link.send(rank=rank, sign=sign(secret, rank, to, joins), **more):
        link.close()
        raise ConnectionResetError
    return link


def greeted(message: dict[str, Any], *, secret: str, me: int) -> int | None:
    """The rank that a first message is of; None where it does not prove it."""
    rank, said, joins = message.get("rank"), message.get("sign"), message.get("joins", [])
    if not isinstance(rank, int) or not isinstance(said, str) or not _numbers(joins):
        return None
    ours = sign(secret, rank, me, joins)
    return rank if hmac.compare_digest(said.encode(), ours.encode()) else None


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, int | float) and abs(one) < 2**_WORD_BITS for one in value
    )


def refuses(peer: Peer, timeout_s: float) -> bool:
    """Whether nobody listens there any more: a rank that is only silent, or cut off, does not
    refuse.
    """
    try:
        socket.create_connection((peer.address, peer.port), timeout=timeout_s).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False
