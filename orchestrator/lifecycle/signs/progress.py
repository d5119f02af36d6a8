"""A rank's place inside the current window, for whoever watches: 32 bytes in a mapped file.

Written at every micro-step, so it must cost nothing: a store into mapped memory, no system call.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from orchestrator.run_folder.files import open_regular, read_bytes

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
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            # Written, not only made that long: a page without room on the disk would be fatal
            # when it is touched, where this raises.
            os.pwrite(descriptor, bytes(_LAYOUT.size), 0)
            self._memory = mmap.mmap(descriptor, _LAYOUT.size)
        finally:
            os.close(descriptor)

    def write(self, update: int, done: int, steps: int) -> None:
        _LAYOUT.pack_into(self._memory, 0, update, done, steps, time.time())


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
