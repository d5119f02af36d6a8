"""Bytes from node to node over TCP, for as long as it takes to know the link's bandwidth."""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
import time

from orchestrator.lifecycle.survival.links import Peer, sign

BYTES = 8 << 20
LONGEST_S = 4.0
"""For one transfer: what has come by then is what the link is judged by."""
_BLOCK = bytes(1 << 18)
_DIGITS = 8
_HELLO = _DIGITS + 64  # a node's number, and its signature
_THANKS = b"k"


class Sink:
    """Takes what other nodes send. Whoever does not know the secret is sent away.

    Args:
        me: this node's number.
    """

    def __init__(self, address: str, me: int) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family)
        self.port, self._me = int(self._socket.getsockname()[1]), me

    def open(self, secret: str) -> None:
        """From now on what comes is taken, in threads."""
        self._secret = secret
        threading.Thread(target=self._accept, name="preflight", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # nobody is connected: that wakes up who accepts
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                other, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._take, args=(other,), daemon=True).start()

    def _take(self, other: socket.socket) -> None:
        """A connection that breaks, or says nothing, is its sender's to judge."""
        with other, contextlib.suppress(OSError):
            other.settimeout(LONGEST_S)
            hello = other.recv(_HELLO, socket.MSG_WAITALL).decode("ascii", "replace")
            number, said = hello[:_DIGITS], hello[_DIGITS:]
            known = number.isdigit() and hmac.compare_digest(
                said.encode(), sign(self._secret, int(number), self._me).encode()
            )
            left = BYTES if known else 0
            while left and (block := other.recv(min(left, 1 << 18))):
                left -= len(block)
            if known and not left:
                other.sendall(_THANKS)


def rate(peer: Peer, *, secret: str, me: int) -> float:
    """How fast `peer`, a node, takes `BYTES` from us, in bytes/s; 0 where it does not at all."""
    sent, began = 0, time.monotonic()
    end = began + LONGEST_S
    try:
        with socket.create_connection((peer.address, peer.port), timeout=LONGEST_S) as other:
            other.sendall(f"{me:0{_DIGITS}d}{sign(secret, me, peer.node)}".encode())
            began = time.monotonic()
            while sent < BYTES:
                other.settimeout(max(0.01, end - time.monotonic()))
                sent += other.send(_BLOCK[: BYTES - sent])  # perhaps not all of it
            if other.recv(1) != _THANKS:
                return 0.0
    except TimeoutError:  # so far it has come
        return sent / LONGEST_S
    except OSError:
        return 0.0
    return sent / max(time.monotonic() - began, 1e-9)
