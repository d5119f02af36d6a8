"""A socket that listens at one address only."""

from __future__ import annotations

import socket


def listen(address: str) -> socket.socket:
    """A socket that listens at `address`, on a port that the kernel chose. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    return listener
