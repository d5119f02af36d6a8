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
from orchestrator.rundir.files import open_nofollow
from orchestrator.rundir.folder import RunDir

HOLDER_BYTES = 256
LOCK_TRIES, LOCK_PAUSE_S = 10, 0.02


@contextlib.contextmanager
def locked(run: RunDir) -> Generator[None]:
    """Lock the run for this launcher. Raises `RunFolderError` while another one does."""
    descriptor = open_nofollow(run.lock, os.O_RDWR | os.O_CREAT)
    if not _lock(descriptor):
        holder = _read_holder(descriptor)
        os.close(descriptor)
        who = f"process {holder[0]} on {holder[1]}" if holder else "another process"
        raise RunFolderError(f"{run.path} is in progress ({who}); stop that one first")
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()} {os.uname().nodename}".encode())
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock a file, unless another process holds it for longer than `is_locked` does."""
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_PAUSE_S)
        except OSError as error:
            raise _no_locks(error) from error
        else:
            return True
    return False


def _no_locks(error: OSError) -> RunFolderError:
    """Return the error for a file system that cannot lock files, as Lustre without -o flock."""
    return RunFolderError(
        f"the file system of the run folder cannot lock files (flock: {error.strerror}); choose "
        "another one: run.dir=/PATH"
    )


def is_locked(run: RunDir) -> bool:
    """Return whether a local launcher holds the run."""
    try:
        descriptor = open_nofollow(run.lock)
    except FileNotFoundError:
        return False
    try:
        return _is_locked(descriptor)
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        raise _no_locks(error) from error
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _read_holder(descriptor: int) -> tuple[int, str] | None:
    """Return the holder's pid and host; None if the lock's file names none."""
    text = os.pread(descriptor, HOLDER_BYTES, 0).decode("utf-8", errors="replace")
    found = re.fullmatch(r"([0-9]+) (\S+)", text)
    return (int(found[1]), found[2]) if found else None


def signal_holder(run: RunDir, *numbers: signal.Signals) -> None:
    """Send signals to the launcher that holds the run, and to no other process.

    Raises:
        ClusterError: no process holds it, or the holder cannot be verified.
    """
    try:
        descriptor = open_nofollow(run.lock)
    except FileNotFoundError:
        raise _nothing_to_cancel(run) from None
    try:
        if not _is_locked(descriptor):
            raise _nothing_to_cancel(run)
        process = _process_of(run, descriptor)
        try:
            for number in numbers:
                signal.pidfd_send_signal(process, number)
        finally:
            os.close(process)
    finally:
        os.close(descriptor)


def _nothing_to_cancel(run: RunDir) -> ClusterError:
    return ClusterError(f"{run.path} is not running; there is nothing to cancel")


def _process_of(run: RunDir, lock: int) -> int:
    """Return a pidfd of the process that holds the lock: the one that its file names, if that has
    the file open.
    """
    holder = _read_holder(lock)
    if holder is None:
        raise ClusterError(f"{run.lock} does not say which process holds the run; nothing was sent")
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
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if os.path.samestat(entry.stat(), os.fstat(lock)):
                    return process
    except OSError as error:
        os.close(process)
        raise unsure from error
    os.close(process)
    raise unsure
