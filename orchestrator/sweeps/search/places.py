"""Where trials run, for a search that starts one as soon as another has ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from orchestrator.errors import ClusterError, Interrupted, NotNow, UsageError
from orchestrator.outcome.folder_status import ENDED_STATES
from orchestrator.report.terminal import say
from orchestrator.run_folder.rundir import RunDir
from orchestrator.runs.cancelling import cancel
from orchestrator.runs.console import Manner
from orchestrator.runs.interrupts import Interrupts
from orchestrator.runs.status import statuses
from orchestrator.sweeps.detached import submit
from orchestrator.sweeps.local.queue import LocalQueue, PointEnded, share_of
from orchestrator.sweeps.local.room import Room
from orchestrator.sweeps.search.asked import Asked
from orchestrator.sweeps.todo import Cell

OVER = (*ENDED_STATES, "lost", "damaged", "private")
LOOK_S = 1.0
SLICE_S = 0.1


class Place(Protocol):
    """Entered, it counts interrupts. With the first nothing more is started."""

    interrupts: Interrupts

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    @property
    def running(self) -> Sequence[Cell]:
        """Those to wait for; after an interrupt none that goes on without us."""
        ...

    @property
    def left(self) -> Sequence[Cell]:
        """Those that go on without us, if we leave now."""
        ...

    def has_room(self, cell: Cell) -> bool: ...
    def start(self, cell: Cell) -> bool:
        """Start a trial; False where it has to wait after all. Raises `ConfigError` where it can
        never run.
        """
        ...

    def follow(self, cell: Cell) -> None:
        """It runs already, as an earlier start of the search has left it."""
        ...

    def wait(self) -> list[PointEnded]:
        """Those that have ended, after a moment at the most."""
        ...

    def stop(self, cell: Cell) -> None:
        """At its next update boundary, with a checkpoint."""
        ...


class Followed:
    """Runs that others hold: asked about, all of them at once."""

    def __init__(self, manner: Manner) -> None:
        self.cells: list[Cell] = []
        self._manner = manner
        self._to_stop: list[Cell] = []  # of those, which nobody could tell yet
        self._next = 0.0

    def ended(self) -> list[PointEnded]:
        if not self.cells or time.monotonic() < self._next:
            return []
        found = statuses(RunDir(cell.run.path) for cell in self.cells)[0]
        self._next = time.monotonic() + LOOK_S
        over = [c for c, status in zip(self.cells, found, strict=True) if status.state in OVER]
        self.cells = [cell for cell in self.cells if cell not in over]
        self._to_stop = [c for c in self._to_stop if c in self.cells and _refusal(c)]
        return [PointEnded(cell=cell, exit_code=0) for cell in over]

    def stop(self, cell: Cell) -> None:
        """Now, or at a later look: it may be over in this moment, or its scheduler silent."""
        if cell in self.cells and (why := _refusal(cell)):
            self._to_stop.append(cell)
            if not self._manner.quiet:
                say(self._manner.console, f"not stopped yet: {why}", "yellow")


def _refusal(cell: Cell) -> str:
    """Have a run stop; why that could not be, or ""."""
    try:
        cancel(cell.run)
    except ClusterError as error:
        return str(error)
    return ""


class Here:
    """On this machine: trials end with the search, and the next start lets them go on."""

    def __init__(self, manner: Manner, most: int | None) -> None:
        self._room = Room(most)
        self._queue = LocalQueue(Manner(console=manner.console, quiet=True), self._room)
        self._followed = Followed(manner)
        self.interrupts = self._queue.interrupts

    def __enter__(self) -> Self:
        self._queue.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._queue.__exit__(kind, error, trace)

    @property
    def running(self) -> Sequence[Cell]:
        return [*self._queue.running, *([] if self.interrupts.count else self._followed.cells)]

    @property
    def left(self) -> Sequence[Cell]:
        return self._followed.cells

    def has_room(self, cell: Cell) -> bool:
        return not self._followed.cells and self._room.has(share_of(cell))

    def start(self, cell: Cell) -> bool:
        return self._queue.start(cell)

    def follow(self, cell: Cell) -> None:
        self._followed.cells.append(cell)

    def wait(self) -> list[PointEnded]:
        one = self._queue.wait_one(SLICE_S)
        if not self._queue.running and one is None:
            time.sleep(SLICE_S)  # what is followed alone
        return [*([one] if one else []), *self._followed.ended()]

    def stop(self, cell: Cell) -> None:
        self._queue.cancel(cell)
        self._followed.stop(cell)


class OnScheduler:
    """Each trial a job, which goes on whatever becomes of the search."""

    def __init__(self, manner: Manner, most: int) -> None:
        self._manner, self._most = manner, most
        self._followed = Followed(manner)
        self._full = ""  # why it takes no more, until one has ended
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
        self.interrupts.__exit__(kind, error, trace)

    @property
    def running(self) -> Sequence[Cell]:
        return [] if self.interrupts.count else self._followed.cells

    @property
    def left(self) -> Sequence[Cell]:
        return self._followed.cells

    def has_room(self, cell: Cell) -> bool:
        del cell
        return not self._full and len(self._followed.cells) < self._most

    def start(self, cell: Cell) -> bool:
        try:
            submit([cell], self._manner, wait=False, interrupts=self.interrupts)
        except Interrupted:
            return False
        except UsageError as error:
            if self.interrupts.count:  # a Ctrl-C ends the scheduler's commands, too
                return False
            if not isinstance(error, NotNow) or not self._followed.cells:
                raise
            self._wait_for_room(str(error))
            return False
        self.follow(cell)
        return True

    def _wait_for_room(self, why: str) -> None:
        self._full = why
        if not self._manner.quiet:
            say(self._manner.console, f"{why}\nthe next trial waits until one has ended", "yellow")

    def follow(self, cell: Cell) -> None:
        self._followed.cells.append(cell)

    def wait(self) -> list[PointEnded]:
        time.sleep(SLICE_S)
        ended = self._followed.ended()
        self._full = "" if ended else self._full
        return ended

    def stop(self, cell: Cell) -> None:
        self._followed.stop(cell)


def place_of(asked: Asked, manner: Manner) -> Place:
    return Here(manner, asked.most) if asked.attended else OnScheduler(manner, asked.most or 1)
