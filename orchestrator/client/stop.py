"""A stop on which all ranks of a program agree without a collective of its own.

Ranks of a synchronous training are never more than one update apart. Rank 0, when it has heard of a
stop after its u-th update, posts "stop after u + 1" before it takes part in the reduction of u + 1;
nobody can be done with u + 1 before that, so whoever asks after u + 1 reads it. What counts is how
often a rank has asked, whatever it calls its updates: those of many loops begin anew each epoch.
Files are written in place and read through a fresh `open`, which is what makes a network's file
system ask for the newest.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from orchestrator.errors import JobError
from orchestrator.rundir.program_link import (
    HEEDS,
    NOT_YET,
    STOP_AFTER,
    STOP_ASKED,
    read_number,
    read_numbers,
    write_number,
)

LOOK_S = 0.05
LEFT_TO_US = (signal.SIG_DFL, signal.default_int_handler, signal.SIG_IGN)
"""What a program has that does nothing about a signal. Shells have what they start with & ignore
SIGINT, and so it is inherited.
"""


class Stop:
    """One rank's part in it.

    Args:
        folder: of the attempt.
        signals: what a stop of the run is for this program.
        warn: tells whoever looks at the run.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        size: int,
        signals: tuple[signal.Signals, ...] = (signal.SIGTERM,),
        warn: Callable[[str], None] = print,
    ) -> None:
        self._folder, self._rank, self._size = folder, rank, size
        self._signals, self._warn = signals, warn
        self._asked_file, self._after_file = str(folder / STOP_ASKED), str(folder / STOP_AFTER)
        self._signalled = self._told = self._heeding = False
        self._after, self._look = NOT_YET, 0.0
        self._calls, self._first, self._pid = 0, 0, os.getpid()
        # Between two calls; None before the second, and once compared.
        self._step: int | None = None

    def due(self, update: int) -> bool:
        """Whether to stop now, after `update`: the same on every rank."""
        if not self._heeding:
            self._heed()
        if self._signalled and not self._told:
            self._told = True
            write_number(self._asked_file, update)
        if self._rank == 0:
            self._decide()
        else:
            self._after = read_number(self._after_file)
        self._compare(update)
        stops = self._after != NOT_YET and self._calls >= self._after
        self._calls += 1
        return stops

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

    def _decide(self) -> None:
        now = time.monotonic()
        if self._after != NOT_YET or now < self._look:
            return
        self._look = now + LOOK_S
        if read_number(self._asked_file) == NOT_YET:
            return
        if not all(self._note(rank).exists() for rank in range(self._size)):
            return  # who never asks is told by rank 0's parent, see `trainer/program.py`
        self._after = self._calls + 1
        write_number(self._after_file, self._after)

    def _compare(self, update: int) -> None:
        """Whether this rank asks as often as rank 0: after every update, say, and not every tenth.

        Looked at after 2, 4, 8, … calls, until rank 0 has asked twice.
        """
        if self._calls == 0:
            self._first = update
        elif self._calls == 1:
            self._step = update - self._first
            if self._rank == 0:
                write_number(str(self._note(0)), os.getpid(), self._step)
        if self._rank == 0 or self._step is None or self._calls & (self._calls - 1):
            return
        _, *theirs = read_numbers(str(self._note(0))) or [NOT_YET]
        if not theirs:
            return
        if theirs != [self._step]:
            self._warn(
                f"rank {self._rank} calls should_stop with updates that are {self._step} apart, "
                f"and rank 0 with updates {theirs[0]} apart: every rank has to call it after every "
                f"update, or they do not stop together"
            )
        self._step = None

    def take(self) -> None:
        """Handle stop signals from now on, in the place of any handler of a framework."""
        self._pid = os.getpid()
        for number in self._signals:
            signal.signal(number, self._handle)

    def _heed(self, *, note: bool = True) -> None:
        """From the first call on, a stop signal is a wish, unless the program has its own way."""
        ours = [number for number in self._signals if signal.getsignal(number) in LEFT_TO_US]
        if threading.current_thread() is not threading.main_thread():
            if ours and note:
                raise JobError(
                    f"run.should_stop() was called in a thread, where no signal can be taken over: "
                    f"call it in the main thread first, or have a handler for {ours[0].name} of "
                    f"your own"
                )
            ours = []  # where there is no run, a signal does what it does without us
        for number in ours:
            signal.signal(number, self._handle)
        self._heeding, self._pid = True, os.getpid()
        if note:  # after that: whoever reads it may send one
            write_number(str(self._note(self._rank)), os.getpid())

    def _note(self, rank: int) -> Path:
        return self._folder / HEEDS.format(rank)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if os.getpid() != self._pid:  # a fork of the program's, which is to end as ever
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._signalled = True
