"""Reports of a command to the program that runs it by `orchestrator.start`.

The command runs in a process of its own, as from a shell, and reports through a pipe what a person
would read: that the run has begun, and in which folder, or why it cannot begin. Without such a
program it reports nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from orchestrator.errors import OrchestratorError
from orchestrator.rundir.files import APPENDING, make_folder, open_nofollow

CALLER_VARIABLE = "ORCHESTRATOR_CALLER"
"""Names the pipe's descriptor. It is taken from the environment at once: ranks are no callers'."""
FOLDER, ERROR, MESSAGE = "folder", "error", "message"  # keys of what is said

_pipe = int(os.environ.pop(CALLER_VARIABLE, "-1"))
if _pipe >= 0:
    os.set_inheritable(_pipe, False)


def tell_begun(folder: Path, log: Path) -> None:
    """Say that the run or sweep in `folder` has begun; what is printed goes to `log` from now on.

    Raises:
        OSError: the log cannot be written.
    """
    if _pipe < 0:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    if not log.parent.exists():
        make_folder(log.parent)
    descriptor = open_nofollow(log, APPENDING)
    os.write(descriptor, os.pread(1, os.fstat(1).st_size, 0))  # what has been printed so far
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    _say({FOLDER: str(folder)})


def tell_error(error: OrchestratorError) -> None:
    """Say why the command ends."""
    if _pipe >= 0:
        _say({ERROR: type(error).__name__, MESSAGE: str(error)})


def _say(message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the caller has ended, and the run continues
        os.write(_pipe, json.dumps(message).encode() + b"\n")
