"""A rank's place inside the current window, for whoever watches: 32 bytes in a file.

Written at every micro-step, with one small call. Not by a store into mapped memory, which would
kill the process where the disk is full or a quota is used up (SIGBUS): some file systems need room
to write the same bytes again.
"""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from orchestrator.run_folder.files import open_regular, read_bytes
from orchestrator.run_warnings import warn

_LAYOUT = struct.Struct("<qqqd")


@dataclass(frozen=True, slots=True)
class Place:
    """Update under way (from 0), micro-steps done and to do in it, and when that was written."""

    update: int
    done: int
    steps: int
    time: float


class ProgressWriter:
    """Owned by one rank."""

    def __init__(self, path: Path) -> None:
        self._descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
        os.pwrite(self._descriptor, bytes(_LAYOUT.size), 0)

    def write(self, update: int, done: int, steps: int) -> None:
        """Where nothing can be written, the place stays what it was, and that is said once."""
        try:
            os.pwrite(self._descriptor, _LAYOUT.pack(update, done, steps, time.time()), 0)
        except OSError as error:
            warn(f"its place could not be written: {error.strerror}", kind="no progress")


def read_progress(path: Path) -> Place | None:
    """The latest place; None before the first."""
    try:
        content = read_bytes(path, at_most=_LAYOUT.size)
    except FileNotFoundError:
        return None
    if len(content) < _LAYOUT.size:
        return None
    place = Place(*_LAYOUT.unpack(content[: _LAYOUT.size]))
    return place if place.time > 0 else None
