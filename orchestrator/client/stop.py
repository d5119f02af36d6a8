"""Agreement of a program's ranks on when to stop, through files, without a collective.

Ranks of a synchronous training are never more than one update apart. Rank 0, if a stop was
requested by its u-th update, posts "stop after u + 1" before it takes part in the reduction of
u + 1; no rank can complete u + 1 before that, so every rank that asks after u + 1 reads it. Calls
are counted, not update numbers, which begin anew each epoch in many loops. Files are written in
place and read through a fresh `open`, which makes network file systems fetch the newest content.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from orchestrator.errors import JobError
from orchestrator.rundir.files import await_disk_space
from orchestrator.rundir.program_link import (
    NOT_YET,
    STOP_AFTER,
    STOP_HANDLER,
    STOP_REQUESTED,
    read_number,
    write_number,
)
from orchestrator.rundir.warnings import warn

POLL_S = 0.05
LEFT_TO_US = (signal.SIG_DFL, signal.default_int_handler, signal.SIG_IGN)
"""Handlers of a program that does nothing about a signal. Shells make background processes ignore
SIGINT, which is inherited.
"""


class Stop:
    """One rank's part in a stop, which any of `signals` requests."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        size: int,
        signals: tuple[signal.Signals, ...] = (signal.SIGTERM,),
    ) -> None:
        self._folder, self._rank, self._size = folder, rank, size
        self._signals = signals
        self._request_file = str(folder / STOP_REQUESTED)
        self._after_file = str(folder / STOP_AFTER)
        self._signalled = self._posted = self._handling = False
        self._before: dict[signal.Signals, Any] = {}  # their handlers
        self._after, self._next_poll = NOT_YET, 0.0
        self._calls, self._pid = 0, os.getpid()

    def due(self, update: int) -> bool:
        """Return whether to stop now, after `update`: the same on every rank."""
        if not self._handling:
            self._install_handlers()
        if self._signalled and not self._posted:
            self._posted = True
            _write(self._request_file, update)
        if self._rank == 0:
            self._decide()
        else:
            self._after = read_number(self._after_file)
        stops = self._after != NOT_YET and self._calls >= self._after
        self._calls += 1
        return stops

    def requested(self, *, run: bool) -> bool:
        """Return whether a stop reached this rank, for ranks that agree by their own reduction.

        Args:
            run: there is a run, whose folder may hold a request.
        """
        if not self._handling:
            self._install_handlers(note=run)
        by_folder = run and self._rank == 0 and read_number(self._request_file) != NOT_YET
        return self._signalled or by_folder

    def agreed(self, update: int) -> None:
        """Record that all ranks stop after `update`, for those that were not signalled."""
        _write(self._after_file, update)

    def _decide(self) -> None:
        now = time.monotonic()
        if self._after != NOT_YET or now < self._next_poll:
            return
        self._next_poll = now + POLL_S
        if read_number(self._request_file) == NOT_YET:
            return
        if not all(self._note(rank).exists() for rank in range(self._size)):
            return  # the agent names the ranks that never ask
        self._after = self._calls + 1
        _write(self._after_file, self._after)

    def replace_handlers(self) -> None:
        """Handle stop signals from now on, in the place of any handler of a framework."""
        self._pid = os.getpid()
        for number in self._signals:
            signal.signal(number, self._handle)

    def _install_handlers(self, *, note: bool = True) -> None:
        """Handle stop signals from the first call on, unless the program has its own handlers."""
        unhandled = [number for number in self._signals if signal.getsignal(number) in LEFT_TO_US]
        if threading.current_thread() is not threading.main_thread():
            if unhandled and note:
                raise JobError(
                    f"run.should_stop() was called in a thread, where no signal can be taken over: "
                    f"call it in the main thread first, or have a handler for {unhandled[0].name} "
                    f"of your own"
                )
            unhandled = []  # outside a run, a signal keeps its effect
        for number in unhandled:
            self._before[number] = signal.signal(number, self._handle)
        self._handling, self._pid = True, os.getpid()
        if note:  # after that: its reader may send a signal
            _write(str(self._note(self._rank)), os.getpid())

    def release_handlers(self) -> None:
        """Give stop signals the handlers back that they had before, and forget a request."""
        if threading.current_thread() is threading.main_thread():
            while self._before:
                signal.signal(*self._before.popitem())
            self._handling = self._signalled = False

    def _note(self, rank: int) -> Path:
        return self._folder / STOP_HANDLER.format(rank)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if os.getpid() != self._pid:  # a fork of the program, which ends as without us
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._signalled = True


def _write(path: str, number: int) -> None:
    """Write a number that the others need; while the disk is full, wait."""
    await_disk_space(partial(write_number, path, number), warn)
