"""Building blocks of a rendezvous: verdicts, listening sockets, reserved ports, published files."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.engine.api import GroupSpec
from orchestrator.errors import RanksMissing, RendezvousError, StopRequested, TransportError
from orchestrator.rundir.files import read_text, write_atomically
from orchestrator.units import named_ranks


def raise_for_verdict(spec: GroupSpec, verdict: dict[str, Any]) -> None:
    """Raise the error of rank 0's verdict, the same on all ranks; return if it is go."""
    kind = verdict.get("verdict", "go")  # a published address is no verdict yet
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
# One rank publishes a file in the run folder, and all others poll for it, ever more rarely.


def backoff() -> Iterator[float]:
    """Yield pauses between polls, in seconds: an eighth of the wait so far, within bounds."""
    began = time.monotonic()
    while True:
        yield min(max(0.05, (time.monotonic() - began) / 8), 2.0)


def publish(path: Path, content: Any) -> None:
    """Write `content` as JSON, at once for all who read it."""
    write_atomically(path, json.dumps(content))


def read_published(path: Path) -> Any | None:
    """Return what was published at `path`; None if nothing was."""
    try:
        return json.loads(read_text(path))
    except FileNotFoundError:
        return None
