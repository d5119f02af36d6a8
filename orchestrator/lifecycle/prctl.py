"""Kernel settings of a process: its parent-death signal, orphan adoption and name."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int | None, by: signal.Signals = signal.SIGKILL) -> None:
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
