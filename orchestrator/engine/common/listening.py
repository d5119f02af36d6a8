"""A socket that listens at one address only, and one that keeps a port for another's server."""

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


def keep_port(address: str) -> socket.socket:
    """A bound socket that keeps a port of this node until it is closed, for one who is only told
    its number: a program's store, MindSpore's scheduler.

    A free port that is looked for and let go of may be another's before it is used. This one stays
    bound, and not listened at: the kernel gives it to nobody who asks for any port, and lets the
    server have it that sets SO_REUSEADDR, as stores and schedulers do. It is kept at every address
    of the node, since many a server listens at all of them: a port that is free at `address` alone
    would not do.

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
