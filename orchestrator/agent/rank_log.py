"""A rank's log: where its output goes, that of C++ and of children included.

A disk that is full must not end a training whose job prints a line. So what Python writes passes
through here: what cannot be written is counted, not raised, and the loss is said in the log as
soon as there is room again.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

from orchestrator.rundir.files import APPENDING, open_nofollow


class LossyFile(io.RawIOBase):
    """A file that takes what it is given, and says later what it could not keep."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lost, self._why = 0, ""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any, /) -> int:
        content = bytes(data)
        try:
            if self._lost:
                word = f"[{self._lost} bytes of this log were lost: {self._why}]\n".encode()
                os.write(self._descriptor, word)
                self._lost = 0
            written = os.write(self._descriptor, content)
        except OSError as error:
            self._lost, self._why = self._lost + len(content), error.strerror or str(error)
            return len(content)
        if written < len(content):  # the last bytes that there was room for
            return written + self.write(content[written:])
        return written


def send_output_to(path: Path) -> None:
    """Make `path` this process's standard output and error, in whole lines."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor = open_nofollow(path, APPENDING)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = _lines(1)
    sys.stderr = _lines(2)


def _lines(descriptor: int) -> io.TextIOWrapper:
    raw = LossyFile(descriptor)
    buffered = io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffered, encoding="utf-8", errors="backslashreplace", line_buffering=True
    )
