"""The lock by which a launcher holds a local run, and signals to its holder.

The kernel releases the lock when its process ends. The file names that process, and outlives it, so
a signal is sent only if the process with that pid holds this very file open: pids are reused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import time
from collections.abc import Generator
from pathlib import Path

from orchestrator.errors import ClusterError, RunFolderError
from orchestrator.interrupt import STOP_REQUEST, catches
from orchestrator.rundir.files import open_nofollow
from orchestrator.rundir.folder import RunDir


@contextlib.contextmanager
def locked(run: RunDir) -> Generator[None]:
    """Lock the run for this launcher. Raises `RunFolderError` while another one does."""
    descriptor = open_nofollow(run.lock, os.O_RDWR | os.O_CREAT)
    try:
        for _ in range(10):  # `is_locked` holds it for a moment
            if _try_lock(descriptor, fcntl.LOCK_EX):
                break
            time.sleep(0.02)
        else:
            who = _describe_holder(descriptor)
            raise RunFolderError(f"{run.path} is in progress ({who}); stop that one first")
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()} {os.uname().nodename}".encode())
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, kind: int) -> bool:
    """Lock a file until it is closed; return whether no other process holds it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # Lustre without -o flock, say
        raise RunFolderError(
            f"the file system of the run folder cannot lock files (flock: {error.strerror}); "
            "choose another one: run.dir=/PATH"
        ) from error
    return True


def is_locked(run: RunDir) -> bool:
    """Return whether a local launcher holds the run."""
    return bool(holder_of(run))


def holder_of(run: RunDir) -> str:
    """Describe the launcher that holds the run, as "process 12 on host"; "" without one."""
    try:
        descriptor = open_nofollow(run.lock)
    except FileNotFoundError:
        return ""
    try:
        return "" if _try_lock(descriptor, fcntl.LOCK_SH) else _describe_holder(descriptor)
    finally:
        os.close(descriptor)


def _describe_holder(descriptor: int) -> str:
    holder = _read_holder(descriptor)
    return f"process {holder[0]} on {holder[1]}" if holder else "another process"


def _read_holder(descriptor: int) -> tuple[int, str] | None:
    """Return the holder's pid and host; None if the lock's file names none."""
    text = os.pread(descriptor, 256, 0).decode("utf-8", errors="replace")
    match = re.fullmatch(r"([0-9]+) (\S+)", text)
    return (int(match[1]), match[2]) if match else None


def signal_holder(run: RunDir, *numbers: signal.Signals) -> None:
    """Send signals to the launcher that holds the run, and to no other process.

    Raises:
        ClusterError: no process holds it, or the holder cannot be verified.
    """
    nothing = ClusterError(f"{run.path} is not running; there is nothing to cancel")
    try:
        lock = open_nofollow(run.lock)
    except FileNotFoundError:
        raise nothing from None
    try:
        if _try_lock(lock, fcntl.LOCK_SH):
            raise nothing
        holder = _read_holder(lock)
        if holder is None:
            raise ClusterError(
                f"{run.lock} does not say which process holds the run; nothing was sent"
            )
        pid, host = holder
        if host != os.uname().nodename:
            raise ClusterError(f"{run.path} is locked by process {pid} on {host}; cancel it there")
        unsure = ClusterError(
            f"process {pid}, which {run.lock} names, is not this run's launcher; nothing was sent"
        )
        try:
            process = os.pidfd_open(pid)  # from here on the pid cannot be reused
        except (OSError, OverflowError) as error:
            raise unsure from error
        try:
            if not _has_open(pid, lock):
                raise unsure
            for number in numbers:
                # A launcher of older code would be killed by `STOP_REQUEST`.
                is_known = number != STOP_REQUEST or catches(pid, number)
                signal.pidfd_send_signal(process, number if is_known else signal.SIGINT)
        finally:
            os.close(process)
    finally:
        os.close(lock)


def _has_open(pid: int, descriptor: int) -> bool:
    """Return whether a process has the file of this descriptor open, as far as we may know."""
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if os.path.samestat(entry.stat(), os.fstat(descriptor)):
                    return True
    return False
