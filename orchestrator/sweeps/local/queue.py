"""The local queue: points of a sweep that run on this machine, beside each other.

Each is held by a process of its own, a fork of this one, as a run that is launched alone is held by
its command: it has the run's lock, it is who `cancel SWEEP/3` signals, and it places the ranks.
When this process ends, however it ends, the kernel ends those processes, and with them their ranks.

A search, or whoever else chooses points one by one, does this:

    with LocalQueue(manner, Room(most)) as queue:
        while more or queue.running:
            while more and queue.start(more[0]):
                more.pop(0)
            ended = queue.wait_one()
"""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from orchestrator.clusters.api import Share, cluster_of
from orchestrator.errors import EXIT_FINISHED, OrchestratorError, describe_status
from orchestrator.lifecycle.forks import fork
from orchestrator.lifecycle.prctl import name_process
from orchestrator.outcome.how_it_stops import how_it_stops
from orchestrator.report.terminal import say
from orchestrator.run_folder.files import APPENDING, open_regular
from orchestrator.run_folder.rundir import RunDir
from orchestrator.runs.console import Manner
from orchestrator.runs.foreground import hold
from orchestrator.runs.interrupts import Interrupts
from orchestrator.sweeps.detached import ready_of
from orchestrator.sweeps.local.room import Place, Room
from orchestrator.sweeps.todo import Cell

LOOK_S = 0.1
LEAVE_S = 10.0  # how long a point may take to end its ranks before it is ended itself
# An interrupt is passed on as signals of different kinds, so that both are delivered.
PASSED_ON = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, kw_only=True, slots=True)
class PointEnded:
    """How a point ended.

    Attributes:
        exit_code: that of the command that would have launched it alone.
        refusal: why it could not start, or left no result; its folder says nothing then.
    """

    cell: Cell
    exit_code: int
    refusal: str | None = None


@dataclass(kw_only=True, slots=True)
class _Running:
    cell: Cell
    pid: int
    link: int
    place: Place
    unread: bytes = b""


def share_of(cell: Cell) -> Share | None:
    """What a point takes of this machine; None where nothing may run beside it."""
    return cluster_of(cell.point.config).share


class LocalQueue:
    """Points that run here now. Entered, it counts interrupts: with the first no more are started,
    and those that run stop at their next update boundary, with a checkpoint; the second ends them
    at once. When it is left none is running.

    Args:
        terminal: points write to this one's terminal (there is never more than one), rather than
            into a file of theirs.
    """

    def __init__(self, manner: Manner, room: Room, *, terminal: bool = False) -> None:
        self._manner, self._room, self._terminal = manner, room, terminal
        self._selector = selectors.DefaultSelector()
        self._running: list[_Running] = []
        self._passed_on = 0
        self._said: set[str] = set()
        self._shares: dict[Path, Share | None] = {}
        self.interrupts = Interrupts()

    def __enter__(self) -> Self:
        self.interrupts.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end_all()
        self._selector.close()
        self.interrupts.__exit__(kind, error, trace)

    @property
    def running(self) -> Sequence[Cell]:
        return [held.cell for held in self._running]

    def has_room(self, cell: Cell) -> bool:
        """Whether a point could start now; none can after an interrupt."""
        return not self.interrupts.count and self._room.has(self._share(cell))

    def start(self, cell: Cell) -> bool:
        """Start a point; False where it has no room yet, or after an interrupt."""
        place = None if self.interrupts.count else self._room.take(self._share(cell))
        if place is None:
            return False
        mine, theirs = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until it counts them itself
        try:
            be = partial(_hold, cell, self._manner, place, theirs, before, own=not self._terminal)
            held = _Running(cell=cell, pid=fork(be), link=mine, place=place)
        finally:
            os.close(theirs)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._running.append(held)
        self._selector.register(mine, selectors.EVENT_READ, held)
        return True

    def wait_one(self, timeout_s: float = math.inf) -> PointEnded | None:
        """Wait for a point to end; None when none runs, or after `timeout_s`."""
        until = time.monotonic() + timeout_s
        while self._running:
            self._pass_on()
            left = until - time.monotonic()
            for key, _ in self._selector.select(max(0.0, min(LOOK_S, left))):
                if (ended := self._heard(key.data)) is not None:
                    return ended
            if left <= 0:
                return None
        return None

    def _share(self, cell: Cell) -> Share | None:
        if cell.run.path not in self._shares:
            self._shares[cell.run.path] = share_of(cell)
        return self._shares[cell.run.path]

    def cancel(self, cell: Cell) -> None:
        """Have a point stop at its next update boundary, with a checkpoint, if it runs."""
        for held in self._running:
            if held.cell.run.path == cell.run.path:
                os.kill(held.pid, signal.SIGINT)

    def _pass_on(self) -> None:
        """What this process was told, to all points: theirs is not the terminal's process group."""
        count = min(self.interrupts.count, len(PASSED_ON))
        if count and not self._passed_on and not self._terminal:
            self._say_stopping()
        for number in PASSED_ON[self._passed_on : count]:
            for held in self._running:
                os.kill(held.pid, number)
        self._passed_on = count

    def _say_stopping(self) -> None:
        begun = [held.cell.run for held in self._running if held.cell.run.plan.exists()]
        ways = dict.fromkeys(map(how_it_stops, begun))
        told = f"each point that runs {', or '.join(ways)}; " if ways else "no more are started; "
        say(self._manner.console, f"{told}once more ends every process at once", "yellow")

    def _heard(self, held: _Running) -> PointEnded | None:
        """Read what the process of a point says; its end, once it has."""
        content = os.read(held.link, 1 << 16)
        if content:
            held.unread += content
            *lines, held.unread = held.unread.split(b"\n")
            for line in lines:
                self._heed(held, json.loads(line))
            return None
        self._selector.unregister(held.link)
        os.close(held.link)
        status = os.waitstatus_to_exitcode(os.waitpid(held.pid, 0)[1])
        self._running.remove(held)
        word: dict[str, Any] = json.loads(held.unread or b"{}")
        begun = held.cell.run.config.exists()
        self._room.give_back(held.place, held.cell.run.read_result() if begun else None)
        if not word:
            return PointEnded(cell=held.cell, exit_code=1, refusal=_died(held.cell.run, status))
        return PointEnded(cell=held.cell, **word)

    def _heed(self, held: _Running, told: dict[str, Any]) -> None:
        """Show what a point said before it began: a warning that many share once."""
        text = told["said"].strip()
        if text not in self._said:
            say(self._manner.console, f"point {held.cell.run.path.name}: {text}", "yellow")
        self._said.add(text)

    def _end_all(self) -> None:
        """End what runs, for whoever waited for it is leaving."""
        for held in self._running:
            for number in PASSED_ON:
                os.kill(held.pid, number)
        self._passed_on = len(PASSED_ON)
        give_up = time.monotonic() + LEAVE_S
        while self._running and time.monotonic() < give_up:
            self.wait_one(give_up - time.monotonic())
        for held in self._running:
            os.kill(held.pid, signal.SIGKILL)
        while self._running:
            self.wait_one()


def _died(run: RunDir, status: int) -> str:
    where = f"; see {run.terminal_log}" if run.terminal_log.exists() else ""
    return f"the process that held it ended without a word ({describe_status(status)}){where}"


def _hold(cell: Cell, manner: Manner, place: Place, link: int, mask: set[int], *, own: bool) -> int:
    """All that the process of a point does: hold the run to its end, and say how it ended.

    Args:
        link: a pipe. What was said before the run began goes there as a JSON line, and at the end,
            without a line's end, what `PointEnded` says.
        mask: of signals, once they are counted.
        own: its terminal is a file in the run's folder.
    """
    name_process(f"point {cell.point.number}")
    with Interrupts() as interrupts:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if place.gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(place.gpus)
        refusal, code = None, EXIT_FINISHED
        screen = _Screen(manner, link) if own else None
        manner = screen.manner if screen else manner
        try:
            with ready_of(cell, manner, interrupts) as ready:
                if screen is not None:
                    screen.move_to(cell.run)
                if ready is not None:
                    code = hold(ready).exit_code
        except OrchestratorError as error:
            refusal, code = str(error), error.exit_code
        word = {"exit_code": code, "refusal": refusal}
        os.write(link, json.dumps(word).encode())
    return code


class _Screen:
    """What a point that runs beside others says: first kept, then in its folder. Errors that are
    none of ours reach this command's terminal as long as there is no folder.
    """

    def __init__(self, manner: Manner, link: int) -> None:
        self._link = link
        self._before = tempfile.TemporaryFile()  # noqa: SIM115  # ends with the process
        os.dup2(self._before.fileno(), 1)
        self.manner = replace(manner, console=Console(width=manner.console.width))

    def move_to(self, run: RunDir) -> None:
        """The run's folder is there: go on in it, and hand on what was said until now."""
        sys.stdout.flush()
        self._before.seek(0)
        said = self._before.read()
        log = open_regular(run.terminal_log, APPENDING)
        os.write(log, said)
        for standard in (1, 2):
            os.dup2(log, standard)
        os.close(log)
        if said:
            line = {"said": said.decode("utf-8", errors="replace")}
            os.write(self._link, json.dumps(line).encode() + b"\n")
