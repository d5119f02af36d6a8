"""Log of a rank or a node: all output of its process, that of C++ and of children included.

A full disk must not end a training whose job prints a line. So Python's output passes through a
file that counts what it cannot write, and notes the loss as soon as there is room.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from pathlib import Path
from typing import Any

from orchestrator.errors import RunFolderError
from orchestrator.rundir.files import APPENDING, open_nofollow, read_end


class LossyFile(io.RawIOBase):
    """A file that never raises; it notes later how much it could not write."""

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
                note = f"[{self._lost} bytes of this log were lost: {self._why}]\n".encode()
                os.write(self._descriptor, note)
                self._lost = 0
            written = os.write(self._descriptor, content)
        except OSError as error:
            self._lost, self._why = self._lost + len(content), error.strerror or str(error)
            return len(content)
        if written < len(content):  # the last bytes that there was room for
            return written + self.write(content[written:])
        return written


def send_output_to(path: Path, process: str) -> None:
    """Make `path` this process's standard output and error, and our loggers write there.

    Args:
        process: the name of this process in our loggers' lines: node and rank.
    """
    descriptor = open_nofollow(path, APPENDING)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = _lines(1)
    sys.stderr = _lines(2)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {process} %(levelname)s: %(message)s"))
    logger = logging.getLogger("orchestrator")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)


def _lines(descriptor: int) -> io.TextIOWrapper:
    raw = LossyFile(descriptor)
    buffered = io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffered, encoding="utf-8", errors="backslashreplace", line_buffering=True
    )


def append_line(path: Path, line: str = "") -> int:
    """Append a line to a rank's log from its agent, after the end of the last line; "" only ends
    that. Return how many bytes were written: 0 on a full disk, or without a folder for the log.
    """
    try:
        descriptor = open_nofollow(path, APPENDING)
    except (OSError, RunFolderError):
        return 0
    try:
        broken = read_end(path, 1) not in (b"", b"\n")
        return os.write(descriptor, ("\n" * broken + (f"{line}\n" if line else "")).encode())
    except OSError:
        return 0
    finally:
        os.close(descriptor)
