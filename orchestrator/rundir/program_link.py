"""The variables and files that a program shares with the run that it is a part of."""

from __future__ import annotations

import os

RUN = "ORCHESTRATOR_RUN"
ATTEMPT = "ORCHESTRATOR_ATTEMPT"
RANK = "ORCHESTRATOR_RANK"
WORLD = "ORCHESTRATOR_WORLD_SIZE"
SIGNAL = "ORCHESTRATOR_STOP_SIGNAL"
WARNINGS = "ORCHESTRATOR_WARNINGS"

# Names in an attempt's folder; `folder.py` has the paths.
STOP_REQUESTED = "stop-requested"
STOP_AFTER = "stop-after"
STOP_HANDLER = "stop-handler-{:05d}"
DECLARED = "declared-{:05d}"  # what a rank says that it does; its agent does not end it for that
WIDTH = 20
NOT_YET = -1


def write_number(path: str, number: int) -> None:
    """Write a number in place, and onto the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, f"{number:<{WIDTH}}".encode("ascii"), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_number(path: str) -> int:
    """Return what `write_number` wrote; NOT_YET without it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return NOT_YET
    try:
        return int(os.pread(descriptor, WIDTH, 0) or NOT_YET)
    finally:
        os.close(descriptor)
