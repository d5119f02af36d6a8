"""Forks: what nodes and ranks of this machine are, and who holds a point of a sweep; and how such
processes end.
"""

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
    """With which status a process ends."""

    code: int = 1


@contextlib.contextmanager
def ending() -> Generator[Ending]:
    """The rest of this process, and of every `fork` of it that comes back to the end of this: none
    lives on after it. The status is 1 when something is raised, which its log then has.
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
    """Who comes out of it is who went in. A fork that somebody else's code made, and did not end
    (`os.fork`, then `sys.exit` or an exception), ends here, and speaks for nobody.
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
    """As Python would end with it; what it says is said."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return (error.code or 0) & 0xFF
    traceback.print_exception(error)
    return 1


def leave(code: int) -> NoReturn:
    """End this process at once: a group of a lost peer would wait in its destructor for operations
    that can never end (architecture.md, at its end), so interpreter shutdown is skipped.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def branch() -> int:
    """`os.fork`, within `ending`: the child has a session of its own, and dies with this process.

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
    """A child that does nothing but `be`, which gives its exit status; give its pid."""
    pid = branch()
    if not pid:
        with ending() as end:
            end.code = be()
    return pid
