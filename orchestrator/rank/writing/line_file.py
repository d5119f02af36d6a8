"""A file of lines that survives a disk without room: what cannot be written now is kept and follows
later, in order; a reader never sees a line with a piece missing.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

from orchestrator.rundir.files import APPENDING, open_nofollow

MOST_LINES = 100_000  # kept in memory, some 70 MB of metrics; the oldest are given up first


class LineFile:
    """Appends whole lines. Its owner is the only writer.

    Attributes:
        lost: lines that were given up, since more than `MOST_LINES` waited.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = open_nofollow(path, APPENDING)
        self._waiting: deque[bytes] = deque(maxlen=MOST_LINES)
        self.lost = 0

    @property
    def waiting(self) -> int:
        """How many lines could not be written yet."""
        return len(self._waiting)

    def write(self, line: str) -> None:
        """Append `line`, after those that wait. Raises `OSError` when it has to wait as well."""
        self.lost += len(self._waiting) == MOST_LINES
        self._waiting.append(line.encode() + b"\n")
        self.flush()

    def flush(self) -> None:
        """Append what waits. Raises `OSError` when there is no room for all of it."""
        while self._waiting:
            end = os.fstat(self._descriptor).st_size
            line = self._waiting[0]
            try:
                written = os.write(self._descriptor, line)
                if written < len(line):  # the last bytes there were: once more, for the reason
                    os.write(self._descriptor, line[written:])
            except OSError:
                os.ftruncate(self._descriptor, end)
                raise
            self._waiting.popleft()

    def close(self) -> None:
        """Raises `OSError` when lines are left that there is no room for."""
        try:
            self.flush()
        finally:
            os.close(self._descriptor)
