"""A stop on which all ranks of a program agree without a collective of its own.

Ranks of a synchronous training are never more than one update apart. Rank 0, when it has heard of a
stop after update u, posts "stop after u + 1" before it takes part in the reduction of u + 1; nobody
can be done with u + 1 before that, so whoever asks after u + 1 reads it. Files are written in place
and read through a fresh `open`, which is what makes a network's file system ask for the newest.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType

from orchestrator.inside.variables import HEEDS, NOT_YET, STOP_AFTER, STOP_ASKED, WIDTH

LOOK_S = 0.05


def write_number(path: str, number: int) -> None:
    """Write a number in place, and onto the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, f"{number:<{WIDTH}}".encode("ascii"), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_number(path: str) -> int:
    """The number in a file; NOT_YET where there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return NOT_YET
    try:
        return int(os.pread(descriptor, WIDTH, 0) or NOT_YET)
    finally:
        os.close(descriptor)


class Stop:
    """One rank's part in it.

    Args:
        folder: of the attempt.
    """

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self._folder, self._rank, self._size = folder, rank, size
        self._asked_file, self._after_file = str(folder / STOP_ASKED), str(folder / STOP_AFTER)
        self._signalled = self._told = self._heeding = False
        self._after, self._look = NOT_YET, 0.0

    def due(self, update: int) -> bool:
        """Whether to stop now, after `update` (from 0): the same on every rank."""
        if not self._heeding:
            self._heed()
        if self._signalled and not self._told:
            self._told = True
            write_number(self._asked_file, update)
        if self._rank == 0:
            self._decide(update)
        else:
            self._after = read_number(self._after_file)
        return self._after != NOT_YET and update >= self._after

    def asked(self, *, run: bool) -> bool:
        """Whether this rank has heard of a stop, for ranks that agree by a reduction of their own.

        Args:
            run: there is a run, in whose folder a stop may have been asked for.
        """
        if not self._heeding:
            self._heed(note=run)
        by_folder = run and self._rank == 0 and read_number(self._asked_file) != NOT_YET
        return self._signalled or by_folder

    def agreed(self, update: int) -> None:
        """Note that all ranks stop after `update`: those that were not signalled as well."""
        write_number(self._after_file, update)

    def _decide(self, update: int) -> None:
        now = time.monotonic()
        if self._after != NOT_YET or now < self._look:
            return
        self._look = now + LOOK_S
        if read_number(self._asked_file) == NOT_YET:
            return
        if not all((self._folder / HEEDS.format(r)).exists() for r in range(self._size)):
            return  # who never asks is told by rank 0's parent, see `rank/program/unheeded.py`
        self._after = update + 1
        write_number(self._after_file, self._after)

    def take(self) -> None:
        """SIGTERM is a wish from now on, whoever else has a handler for it: a framework's, say."""
        signal.signal(signal.SIGTERM, self._handle)

    def _heed(self, *, note: bool = True) -> None:
        """From the first call on, SIGTERM is a wish, unless the program has its own way with it."""
        self._heeding = True
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)
        if note:  # after that: whoever reads it may send one
            write_number(str(self._folder / HEEDS.format(self._rank)), self._rank)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._signalled = True
