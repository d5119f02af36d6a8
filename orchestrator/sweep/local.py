"""Execution of a sweep's points on this machine, several at once where they fit."""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from orchestrator.agent.processes import fork, name_process
from orchestrator.cli.follow import Interrupts, OutputOptions, run_to_end
from orchestrator.clusters.api import Share, cluster_of
from orchestrator.clusters.machine import Machine, free_memory_bytes
from orchestrator.config.rules import at_once
from orchestrator.config.schema import Config
from orchestrator.errors import EXIT_FINISHED, EXIT_STOPPED, OrchestratorError, describe_status
from orchestrator.plan.program import ProgramPlan
from orchestrator.report.sweep_tables import only_varying
from orchestrator.report.terminal import say
from orchestrator.rundir import lock as run_lock
from orchestrator.rundir.files import APPENDING, open_nofollow
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.lock import take_waiting
from orchestrator.rundir.metrics import summarize
from orchestrator.rundir.outcome import describe_culprit, describe_stop
from orchestrator.sweep.cells import Cell
from orchestrator.sweep.submission import ready_of
from orchestrator.units import format_bytes, format_number, format_seconds, plural

RANK_BYTES = 512 << 20
"""What a rank is taken to need before one has been measured: a framework's import is most of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What one run has taken. `gpus`: by name; none where it computes without."""

    share: Share | None
    gpus: tuple[str, ...]


class Room:
    """What is free here, and who has taken how much of it.

    A run that is larger than the machine has it to itself. What nobody can know before is how much
    memory a run will need: its ranks are taken for as large as the largest that was measured.

    Args:
        most: runs at once, also where they have to share cores; None: as many as there are cores
            for. GPUs are never shared, and memory has to suffice in either case.
        machine: as it was before the first of them.
    """

    def __init__(self, most: int | None = None, machine: Machine | None = None) -> None:
        self.most, self._machine = most, machine or Machine.here()
        self._rank_bytes, self._measured = RANK_BYTES, False
        self._taken: list[Place] = []

    def has(self, share: Share | None) -> bool:
        """Return True if there is room for a run now. One larger than the machine waits until it is
        alone.
        """
        if not self._taken:
            return True
        if share is None or not self._holds([*(place.share for place in self._taken), share]):
            return False
        return free_memory_bytes() >= share.ranks * self._rank_bytes

    def take(self, share: Share | None) -> Place | None:
        """Room for a run; None where it has to wait for others to end."""
        if not self.has(share):
            return None
        used = {name for place in self._taken for name in place.gpus}
        free = [name for name in self._machine.gpus if name not in used]
        place = Place(share=share, gpus=tuple(free[: self._gpus_of(share)]))
        self._taken.append(place)
        return place

    def give_back(self, place: Place, result: Mapping[str, Any] | None = None) -> None:
        """Free the place of a run that has ended.

        Args:
            result: its result.json, which says how much memory its ranks needed.
        """
        self._taken.remove(place)
        peaks = [size for size in (result or {}).get("peak_memory_bytes") or () if size]
        if peaks:
            known = self._rank_bytes if self._measured else 0
            self._rank_bytes, self._measured = max(known, *peaks), True

    def at_once(self, shares: Sequence[Share | None]) -> int:
        """Return how many of such runs fit at once, the small ones first."""
        able = sorted((s for s in shares if s), key=lambda s: (s.gpus, s.cores, s.ranks))
        most = min(len(able), self.most or len(able))
        return next((n for n in range(most, 1, -1) if self._holds(able[:n])), 1)

    def remark(self, shares: Sequence[Share | None]) -> str | None:
        """Return a warning if `most` is more than this machine can hold."""
        able = [s for s in shares if s]
        wanted = min(self.most or 1, len(able))
        if wanted < 2:
            return None
        found, needed = self.at_once(shares), wanted * max(s.cores for s in able)
        if found < wanted:
            gpus = plural(len(self._machine.gpus), "GPU")
            free, each = map(format_bytes, (self._machine.free_memory_bytes, self._rank_bytes))
            return (
                f"sweep.parallel={self.most}: this machine has room for {plural(found, 'point')} "
                f"at once ({gpus}, {free} of memory free, {each} a rank)"
            )
        if needed > self._machine.cores:
            return (
                f"sweep.parallel={self.most}: {wanted} points at once ask for {needed} cores, and "
                f"this machine has {self._machine.cores}, so that each of them takes longer; "
                f"sweep.parallel=auto starts as many as it has cores for"
            )
        return None

    def _holds(self, shares: Sequence[Share | None]) -> bool:
        able = [share for share in shares if share]
        return (
            len(able) == len(shares) <= (self.most or len(shares))
            and (self.most is not None or sum(s.cores for s in able) <= self._machine.cores)
            and sum(map(self._gpus_of, able)) <= len(self._machine.gpus)
            and sum(s.ranks for s in able) * self._rank_bytes <= self._machine.free_memory_bytes
        )

    def _gpus_of(self, share: Share | None) -> int:
        """Return how many GPUs a run uses: none if there are fewer than it has ranks."""
        return share.gpus if share and share.gpus <= len(self._machine.gpus) else 0


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
    """Return what a point takes of this machine; None if no other may run at the same time."""
    return cluster_of(cell.point.config).share


class LocalQueue:
    """Points that run here now. Entered, it counts interrupts: with the first no more are started,
    and those that run stop at their next update boundary, with a checkpoint; the second ends them
    at once. When it is left none is running.

    Args:
        terminal: points write to this one's terminal (there is never more than one), rather than
            into a file of theirs.
    """

    def __init__(self, output: OutputOptions, room: Room, *, terminal: bool = False) -> None:
        self._output, self._room, self._terminal = output, room, terminal
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
        """Return True if a point could start now. After an interrupt none can."""
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
            be = partial(_hold, cell, self._output, place, theirs, before, own=not self._terminal)
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
        """Pass interrupts on to all points, which are not in the terminal's process group."""
        count = min(self.interrupts.count, len(PASSED_ON))
        if count and not self._passed_on and not self._terminal:
            self._say_stopping()
        for number in PASSED_ON[self._passed_on : count]:
            for held in self._running:
                os.kill(held.pid, number)
        self._passed_on = count

    def _say_stopping(self) -> None:
        begun = [held.cell.run for held in self._running if held.cell.run.plan.exists()]
        ways = dict.fromkeys(map(describe_stop, begun))
        told = f"each point that runs {', or '.join(ways)}; " if ways else "no more are started; "
        say(self._output.console, f"{told}once more ends every process at once", "yellow")

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
            say(self._output.console, f"point {held.cell.run.path.name}: {text}", "yellow")
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


def _hold(
    cell: Cell, output: OutputOptions, place: Place, link: int, mask: set[int], *, own: bool
) -> int:
    """Run a point in a process of its own to its end, and report how it ended.

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
        screen = _Screen(output, link) if own else None
        output = screen.output if screen else output
        try:
            with ready_of(cell, output, interrupts) as ready:
                if screen is not None:
                    screen.move_to(cell.run)
                if ready is not None:
                    code = run_to_end(ready).exit_code
        except OrchestratorError as error:
            refusal, code = str(error), error.exit_code
        word = {"exit_code": code, "refusal": refusal}
        os.write(link, json.dumps(word).encode())
    return code


class _Screen:
    """What a point that runs beside others says: first kept, then in its folder. Errors that are
    none of ours reach this command's terminal as long as there is no folder.
    """

    def __init__(self, output: OutputOptions, link: int) -> None:
        self._link = link
        self._before = tempfile.TemporaryFile()  # noqa: SIM115  # ends with the process
        os.dup2(self._before.fileno(), 1)
        self.output = replace(output, console=Console(width=output.console.width))

    def move_to(self, run: RunDir) -> None:
        """Continue in the log of the run's folder, and hand on the output so far."""
        sys.stdout.flush()
        self._before.seek(0)
        said = self._before.read()
        log = open_nofollow(run.terminal_log, APPENDING)
        os.write(log, said)
        for standard in (1, 2):
            os.dup2(log, standard)
        os.close(log)
        if said:
            line = {"said": said.decode("utf-8", errors="replace")}
            os.write(self._link, json.dumps(line).encode() + b"\n")


TIMED = ("accumulation", "cluster", "engine", "transport")
"""Sections that people vary to see how fast a run is, and what it needs."""
NOT_BEGUN = "it was cancelled while it waited for room"


def run_here(
    cells: Sequence[Cell], output: OutputOptions, on_end: Callable[[PointEnded], None]
) -> bool:
    """Run points to their ends, as many at once as `sweep.parallel` and the machine allow: a next
    one starts when one ends.

    Returns:
        True if all of them have run; False after an interrupt.
    """
    room = Room(most_at_once([cell.point.config for cell in cells], output))
    shares = [share_of(cell) for cell in cells]
    if remark := room.remark(shares):
        say(output.console, remark, "yellow", prose=True)
    alone = room.at_once(shares) == 1
    waiting = list(cells) if alone else sorted(cells, key=_work, reverse=True)
    names = _names(cells)
    runs = [cell.run for cell in cells]
    with LocalQueue(output, room, terminal=alone) as queue:

        def end(one: PointEnded) -> None:
            on_end(one)
            name, good = names[one.cell.run.path], one.exit_code == EXIT_FINISHED
            if one.refusal is not None:
                say(output.console, f"{name}: {one.refusal}", "bold red")
            elif not alone and not (output.quiet and good):  # alone, it has shown that itself
                counts = f"{len(queue.running)} running, {len(waiting)} waiting"
                left = counts if queue.running or waiting else "the last"
                style = "green" if good else "bold red"
                say(output.console, f"{name}: {_outcome(one)} ({left})", style)

        run_lock.mark_waiting(runs)
        try:
            while True:
                for cell in list(waiting):
                    if not queue.has_room(cell):
                        continue
                    waiting.remove(cell)
                    if not take_waiting(cell.run):  # `cancel SWEEP/5` was quicker
                        end(PointEnded(cell=cell, exit_code=EXIT_STOPPED, refusal=NOT_BEGUN))
                        continue
                    if alone:
                        say(output.console, cell.point.words, "bold")
                    elif not output.quiet:
                        say(output.console, f"{names[cell.run.path]} starts", "dim")
                    if not queue.start(cell):  # an interrupt, or the memory is gone meanwhile
                        run_lock.mark_waiting([cell.run])
                        waiting.append(cell)
                one = queue.wait_one()
                if one is None:
                    return not waiting
                end(one)
        finally:
            run_lock.clear_waiting(runs)


def _names(cells: Sequence[Cell]) -> dict[Path, str]:
    """Return a name for each point, with the overrides that tell it from the others."""
    varying = only_varying([cell.point.overrides for cell in cells])
    return {
        cell.run.path: f"point {cell.run.path.name} ({' '.join(f'{k}={v}' for k, v in o.items())})"
        for cell, o in zip(cells, varying, strict=True)
    }


def most_at_once(configs: Sequence[Config], output: OutputOptions) -> int | None:
    """Return the number in `sweep.parallel`; with `auto`, 1 if points differ in what sets their
    speed, since their times are compared.
    """
    first, *others = configs
    asked = at_once(first.sweep.parallel)
    unlike = [n for n in TIMED if any(getattr(c, n) != getattr(first, n) for c in others)]
    if asked is not None or not unlike:
        return asked
    if not output.quiet:
        say(
            output.console,
            f"one point after another, since they differ in {', '.join(unlike)}, and their times "
            f"are compared; sweep.parallel=2 runs two at once",
            "dim", prose=True,
        )  # fmt: skip
    return 1


def _work(cell: Cell) -> float:
    """Estimate how much a point computes (samples or epochs): the long ones begin first."""
    plan = cell.point.plan
    if isinstance(plan, ProgramPlan):
        return 0.0
    if plan.updates is None:
        return cell.point.config.train.epochs or 0.0
    return float(plan.updates * plan.batch.global_batch)


def _outcome(one: PointEnded) -> str:
    """Return how a point ended and what it measured, in a few words."""
    result = one.cell.run.read_result() or {}
    if result.get("culprit"):
        return describe_culprit(result["culprit"])
    figures = summarize(result, ())
    loss = result.get("loss")
    return ", ".join([
        f"{figures.state}",
        plural(figures.updates, "update"),
        *([] if loss is None else [f"loss {format_number(loss)}"]),
        *([] if figures.seconds is None else [format_seconds(figures.seconds)]),
    ])  # fmt: skip
