"""A stop that came to a rank, on its way to the program: as the signal that the program knows."""

from __future__ import annotations

import os
import signal
import time

from orchestrator.inside.stop import read_number, write_number
from orchestrator.inside.variables import HEEDS, NOT_YET
from orchestrator.lifecycle.signs.processes import descendants, state_of
from orchestrator.lifecycle.stopping.stop_signals import StopFlag
from orchestrator.rundir.folder import RunDir

AGAIN_S = 5.0  # after which another stop signal of ours is passed on as well


class PassingOn:
    """To the process that asks `should_stop`, or to all of the program where none does. Workers of
    a loader would end by it before the update is done, and take the training with them.

    Args:
        number: the signal.

    Attributes:
        done: whether the program was told to stop.
    """

    def __init__(
        self, run: RunDir, attempt: int, rank: int, stop: StopFlag, number: signal.Signals
    ) -> None:
        self._stop, self._number = stop, number
        self._note = run.attempt(attempt) / HEEDS.format(rank)
        self._asked_file = str(run.stop_asked(attempt))
        self._agreed_file = str(run.stop_after(attempt))
        self._at: float | None = None
        self._told: int | None = None  # which process; all of them, where None

    @property
    def done(self) -> bool:
        return self._at is not None

    def look(self, pid: int) -> None:
        """Pass on what there is. `pid`: of the program's first process, which leads its group."""
        if not self._stop.requested:
            return
        now, heeding = time.monotonic(), self._heeding(pid)
        others_left = self._told is not None and heeding is None  # they have not heard of it
        if self._at is not None and not others_left:
            again = max(self._stop.times.values(), default=0.0) > self._at
            if not again or now < self._at + AGAIN_S:
                return
        first, self._at, self._told = self._at is None, now, heeding
        if first and heeding is not None and read_number(self._agreed_file) != NOT_YET:
            return  # it knows from the others, or is done: a Python that ends has no handler left
        print(f"asked to stop: {self._number.name} to the program", flush=True)
        write_number(self._asked_file, 0)
        try:
            if heeding is None:
                os.killpg(pid, self._number)
            else:
                os.kill(heeding, self._number)
        except ProcessLookupError:  # it has just ended
            return

    def _heeding(self, pid: int) -> int | None:
        """The process that asks `should_stop`, as long as it is there."""
        found = read_number(str(self._note))
        ours = found in (pid, *descendants(pid)) and state_of(found) not in "ZX"
        return found if ours else None
