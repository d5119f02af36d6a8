"""A program's processes, seen from outside: stopped, at work, joined to the others, left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Collection

import psutil

from orchestrator.lifecycle.signs.processes import descendants, processor_s, state_of

LINGER_S = 1.0  # for what ends by itself once the program has: loaders, trackers
KILL_S = 5.0


def is_stopped(pid: int) -> bool:
    """Whether the program, or any process of it, is stopped (SIGSTOP)."""
    return any(state_of(one) == "T" for one in (pid, *descendants(pid)))


def used_s(pid: int) -> float:
    """Processor time of the program's processes so far."""
    return sum(map(processor_s, (pid, *descendants(pid))))


def has_joined(pid: int, port: int) -> bool:
    """Whether a process of the program serves the port where ranks meet, or is connected to it."""
    for one in (pid, *descendants(pid)):
        try:
            found = psutil.Process(one).net_connections(kind="tcp")
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended, or became another's
            continue
        for connection in found:
            local, remote = connection.laddr, connection.raddr
            if connection.status == psutil.CONN_LISTEN and local and local.port == port:
                return True
            if connection.status == psutil.CONN_ESTABLISHED and remote and remote.port == port:
                return True
    return False


def is_served(address: str, port: int) -> bool:
    """Whether anybody listens where ranks meet."""
    try:
        with socket.create_connection((address, port), timeout=1.0):
            return True
    except OSError:
        return False


def end_leftovers(spare: Collection[int] = ()) -> int:
    """End what the program left running, after a moment in which it may end by itself.

    Returns:
        How many had to be ended.
    """
    now = time.monotonic()
    linger, until = now + LINGER_S, now + KILL_S
    ended: set[int] = set()
    while time.monotonic() < until:
        found = [pid for pid in descendants(os.getpid()) if pid not in spare and _lives(pid)]
        if not found:
            break
        if time.monotonic() > linger:
            for pid in found:
                _kill(pid)
                ended.add(pid)
        time.sleep(0.01)
    return len(ended)


def end_all(pid: int) -> None:
    """End the program and all its processes at once."""
    for one in (*descendants(pid), pid):
        _kill(one)


def _lives(pid: int) -> bool:
    if state_of(pid) not in "ZX":
        return True
    with contextlib.suppress(ChildProcessError):  # not ours yet: its parent is to collect it
        os.waitpid(pid, os.WNOHANG)
    return False


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:  # it ended in this moment
        return
