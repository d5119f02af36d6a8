"""Only the newest attempt of a run writes: what keeps a forgotten, still running one from harm.

When a node's slurmd dies, SLURM starts the job again elsewhere but cannot end the processes on the
lost node: they run on, sometimes for a long time. Each attempt has a higher number than all before
it and publishes it in the run folder; whoever finds a higher number than its own is superseded.

The number is written in place and read through a fresh `open`, because on NFS it is opening a file
that asks the server for its newest content; a look into a folder may be answered from a cache.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from orchestrator.errors import OrchestratorError, RunFolderError
from orchestrator.run_folder.files import open_regular, read_text

WIDTH = 12


class Superseded(OrchestratorError):
    """A newer attempt of the same run has begun; this one must not write any more."""


def read_newest(path: Path) -> int:
    """The newest attempt that was published; -1 before the first."""
    try:
        text = read_text(path, at_most=WIDTH + 1).strip()
    except FileNotFoundError:
        return -1
    if not re.fullmatch(r"[0-9]*", text):
        raise RunFolderError(f"{path} is damaged: it is not the number of an attempt")
    return int(text or -1)


class Fence:
    """One attempt's right to write."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._path, self._attempt = path, attempt

    def take(self) -> None:
        """Publish this attempt as the newest. Raises `Superseded` if a newer one was here first."""
        self.check()
        descriptor = open_regular(self._path, os.O_WRONLY | os.O_CREAT)
        try:
            os.pwrite(descriptor, f"{self._attempt:<{WIDTH}}".encode("ascii"), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @property
    def superseded(self) -> bool:
        return read_newest(self._path) > self._attempt

    def check(self) -> None:
        """Raises `Superseded` once a newer attempt has begun."""
        newest = read_newest(self._path)
        if newest > self._attempt:
            raise Superseded(
                f"attempt {newest} of this run has begun; this process of attempt "
                f"{self._attempt} was forgotten by the scheduler and ends without writing"
            )
