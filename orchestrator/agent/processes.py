"""Forks for nodes and ranks of this machine and for a sweep's points, and their exit."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import NoReturn

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def exit_with(main: Callable[[], int]) -> NoReturn:
    """End this process, and every fork that escapes `main`, with the status that it returns.

    The status is 1 when it raises; the log then has the traceback.
    """
    code = 1
    try:
        code = main()
    except BaseException:  # noqa: BLE001  # a child must not live on as a second parent
        traceback.print_exc()
    finally:
        leave(code)


@contextlib.contextmanager
def this_process_alone() -> Generator[None]:
    """Exit any forked child that escapes this block.

    Other code may fork and not end the child (`os.fork`, then `sys.exit` or an exception).
    """
    own_pid = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() == own_pid:
            raise
        leave(_status_of(error))
    if os.getpid() != own_pid:
        leave(0)


def _status_of(error: BaseException) -> int:
    """Return the exit status that Python would give, and print the error as it would."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return (error.code or 0) & 0xFF
    traceback.print_exception(error)
    return 1


def leave(code: int) -> NoReturn:
    """End this process at once, without interpreter shutdown.

    A group with a lost peer would wait in its destructor for operations that can never end.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def fork_session() -> int:
    """Fork within `exit_with`: the child has its own session, and dies with this process.

    Returns:
        The child's pid; in the child 0.
    """
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        set_parent_death_signal(parent)
        os.setsid()
    return pid


def fork(be: Callable[[], int]) -> int:
    """Fork a child that only calls `be`, which returns its exit status; return its pid."""
    pid = fork_session()
    if not pid:
        exit_with(be)
    return pid


def wait_readable(descriptors: Iterable[int], timeout_s: float) -> list[int]:
    """Return those of these descriptors that can be read, or were closed at the other end, as soon
    as there are any. `select.select` fails for descriptors from 1,024 on.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [ready for ready, _ in poll.poll(timeout_s * 1000)]


# ----------------------------------------------------------------------
# Kernel settings of a process: its parent-death signal, orphan adoption and name.

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def set_parent_death_signal(parent: int | None, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its parent ends; with None, no longer.

    Args:
        parent: its pid, to detect a parent that has already ended.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, 0 if parent is None else by, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def name_process(name: str) -> None:
    """Set the name of this process in `ps -o comm` and `top`; the kernel keeps 15 bytes."""
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


# ----------------------------------------------------------------------
# What the kernel knows of a process: whether it works, is stopped, or sleeps for good.


def _fields_of(pid: int) -> list[str] | None:
    """Return a process's fields of /proc/PID/stat from its state on; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()  # the process name may hold anything


def state_of(pid: int) -> str:
    """Return the kernel's state letter of a process: T stopped, t traced; X if it has ended."""
    fields = _fields_of(pid)
    return fields[0] if fields else "X"


def processor_s(pid: int) -> float:
    """Return the processor time of a process so far, in seconds; 0.0 if it has ended."""
    fields = _fields_of(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S if fields else 0.0


def parent_of(pid: int) -> int:
    """Return the pid of a process's parent; 0 if the process has ended, or none is known."""
    fields = _fields_of(pid)
    return int(fields[1]) if fields else 0


def began_at(pid: int) -> float | None:
    """Return when a process began, by `time.monotonic`; None if it has ended."""
    fields = _fields_of(pid)
    if not fields:
        return None
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / TICKS_PER_S
    return time.monotonic() - age_s


def waits_of(threads: Iterable[tuple[int, int]]) -> int:
    """Return how often threads, given as (process, thread), have begun to wait so far.

    One that waits for an event that never comes adds none. One that sends over a slow network, or
    looks for something once a second, does, with next to no processor time.
    """
    count = 0
    for pid, thread in threads:
        path = Path(f"/proc/{pid}/task/{thread}/status")
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        name = "voluntary_ctxt_switches:"
        line = next(line for line in text.splitlines() if line.startswith(name))
        count += int(line.removeprefix(name))
    return count


def asleep_in(pid: int) -> str:
    """Return the kernel function in which a process sleeps uninterruptibly (state D).

    As when a disk or network file system does not answer; "" if it does not sleep like that.
    """
    if state_of(pid) != "D":
        return ""
    try:
        name = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii").strip("0\n")
    except OSError:  # needs permission
        name = ""
    return name or "the kernel"


def descendants(pid: int) -> list[int]:
    """Return all descendants of a process: loader workers, compilers."""
    pids: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(word) for word in path.read_text(encoding="ascii").split()]
        except (FileNotFoundError, ProcessLookupError):  # that thread has just ended
            continue
        for child in children:
            pids += [child, *descendants(child)]
    return pids
