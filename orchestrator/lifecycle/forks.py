"""Forks for nodes and ranks of this machine and for a sweep's points, and their exit."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import NoReturn

from orchestrator.lifecycle.prctl import die_with


@dataclass(slots=True)
class Ending:
    """Exit status of a process."""

    code: int = 1


@contextlib.contextmanager
def ending() -> Generator[Ending]:
    """End this process, and every fork that escapes the block, at the end of the block.

    The status is 1 when the block raises; the log then has the traceback.
    """
    end = Ending()
    try:
        yield end
    except BaseException:  # noqa: BLE001  # a child must not live on as a second parent
        traceback.print_exc()
        end.code = 1
    finally:
        leave(end.code)


@contextlib.contextmanager
def this_process_alone() -> Generator[None]:
    """Exit any forked child that escapes this block.

    Other code may fork and not end the child (`os.fork`, then `sys.exit` or an exception).
    """
    mine = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() == mine:
            raise
        leave(_status_of(error))
    if os.getpid() != mine:
        leave(0)


def _status_of(error: BaseException) -> int:
    """Return the exit status that Python would give, and print the error as it would."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return (error.code or 0) & 0xFF
    traceback.print_exception(error)
    return 1


def leave(code: int) -> NoReturn:
    """End this process at once, without interpreter shutdown.

    A group with a lost peer would wait in its destructor for operations that can never end
    (architecture.md, at its end).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def branch() -> int:
    """Fork within `ending`: the child has its own session, and dies with this process.

    Returns:
        The child's pid; in the child 0.
    """
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        die_with(parent)
        os.setsid()
    return pid


def fork(be: Callable[[], int]) -> int:
    """Fork a child that only calls `be`, which returns its exit status; return its pid."""
    pid = branch()
    if not pid:
        with ending() as end:
            end.code = be()
    return pid
