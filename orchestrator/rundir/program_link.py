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
STOP_ASKED = "stop-asked"
STOP_AFTER = "stop-after"
HEEDS = "heeds-{:05d}"
WIDTH = 40
NOT_YET = -1


def write_number(path: str, *numbers: int) -> None:
    """Write a number, or several, in place, and onto the disk."""
    text = " ".join(map(str, numbers))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, f"{text:<{WIDTH}}".encode("ascii"), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_number(path: str) -> int:
    """Return the first number in a file; NOT_YET if it has none."""
    return next(iter(read_numbers(path)), NOT_YET)


def read_numbers(path: str) -> list[int]:
    """Return what `write_number` wrote; nothing without a file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    try:
        return [int(word) for word in os.pread(descriptor, WIDTH, 0).split()]
    finally:
        os.close(descriptor)
