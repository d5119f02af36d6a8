"""TCP connections of other processes of one's own: cut, or made deaf, from outside.

The kernel lends a process's sockets to whoever may debug it (pidfd_getfd). A socket that is shut
down ends the connection, as a switch does that resets it. One that drops all that comes in (a
filter, socket(7)) is what a pulled cable looks like to both ends, if both have it: what is sent is
never acknowledged, and nobody is told. What was lent is given back at once: a copy that stays open
would keep a killed process's connections alive.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Generator, Iterable
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Literal

import psutil

from orchestrator.errors import UsageError

_GETFD = 438  # pidfd_getfd's number, on every architecture
_ATTACH_FILTER, _DETACH_FILTER = 26, 27
_DROP_ALL = struct.pack("HBBI", 6, 0, 0, 0)  # one instruction of BPF: take 0 bytes of the packet
_libc = ctypes.CDLL(None, use_errno=True)

End = tuple[str, int]
Way = Literal["cut", "deafen", "hear"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """One end of one. `there` is None of a socket that listens."""

    pid: int
    descriptor: int
    here: End
    there: End | None


def connections(pid: int) -> list[Connection]:
    """Those of a process, and where it listens; none of one that has ended."""
    try:
        found = psutil.Process(pid).net_connections("tcp")
    except psutil.NoSuchProcess:
        return []
    return [
        Connection(
            pid=pid,
            descriptor=one.fd,
            here=(one.laddr.ip, one.laddr.port),
            there=(one.raddr.ip, one.raddr.port) if one.raddr else None,
        )
        for one in found
        if one.laddr
    ]


def change(connection: Connection, way: Way) -> None:
    """Cut it, make this end deaf, or let it hear again. One that is closed meanwhile stays so."""
    try:
        with _lent(connection.pid, connection.descriptor) as lent:
            if way == "cut":
                lent.shutdown(socket.SHUT_RDWR)
            elif way == "deafen":
                program = ctypes.create_string_buffer(_DROP_ALL)
                filter_ = struct.pack("HP", 1, ctypes.addressof(program))
                lent.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, filter_)
            else:
                lent.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
    except PermissionError:
        raise
    except OSError:  # its process has closed it, or has ended; a socket that hears has no filter
        return


def check_lending(those: Iterable[Connection] = ()) -> None:
    """Whether this kernel lends sockets of ours, and each of `those`.

    Raises:
        UsageError: it does not; says what is missing.
    """
    with closing(socket.socket()) as own:
        for pid, descriptor in [
            (os.getpid(), own.fileno()),
            *((one.pid, one.descriptor) for one in those),
        ]:
            try:
                with _lent(pid, descriptor):
                    pass
            except ProcessLookupError:  # it has ended
                continue
            except OSError as error:
                if error.errno == errno.EBADF:  # it is closed
                    continue
                raise UsageError(
                    f"connections cannot be cut from outside here: pidfd_getfd: {error.strerror} "
                    "(it needs Linux 5.6, a sandbox that allows it, and, on SLURM, "
                    "kernel.yama.ptrace_scope=0)"
                ) from error


@contextmanager
def _lent(pid: int, descriptor: int) -> Generator[socket.socket]:
    process = os.pidfd_open(pid)
    try:
        number = _libc.syscall(_GETFD, process, descriptor, 0)
        if number < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        os.close(process)
    with closing(socket.socket(fileno=number)) as lent:
        yield lent
