"""Points of a sweep that run on this machine: all of them to their ends, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from orchestrator.config.rules import at_once
from orchestrator.config.schema import Config
from orchestrator.errors import EXIT_FINISHED, EXIT_STOPPED
from orchestrator.plan.program import ProgramPlan
from orchestrator.report.summary import summarize
from orchestrator.report.tables.closing_table import describe_culprit
from orchestrator.report.terminal import say
from orchestrator.report.units import format_number, format_seconds, plural
from orchestrator.runs import waiting as waiting_room
from orchestrator.runs.console import Manner
from orchestrator.runs.waiting import take
from orchestrator.sweeps.local.queue import LocalQueue, PointEnded, share_of
from orchestrator.sweeps.local.room import Room
from orchestrator.sweeps.shown import only_varying
from orchestrator.sweeps.todo import Cell

TIMED = ("accumulation", "cluster", "engine", "transport")
"""Sections that people vary to see how fast a run is, and what it needs."""
NOT_BEGUN = "it was cancelled while it waited for room"


def run_here(cells: Sequence[Cell], manner: Manner, ended: Callable[[PointEnded], None]) -> bool:
    """Run points to their ends, as many at once as `sweep.parallel` and the machine allow: a next
    one starts when one ends.

    Args:
        ended: is told of each.

    Returns:
        Whether all of them have run; not after an interrupt.
    """
    room = Room(most_at_once([cell.point.config for cell in cells], manner))
    shares = [share_of(cell) for cell in cells]
    if remark := room.remark(shares):
        say(manner.console, remark, "yellow", prose=True)
    alone = room.at_once(shares) == 1
    waiting = list(cells) if alone else sorted(cells, key=_work, reverse=True)
    told = _Told(manner, cells, alone=alone)
    runs = [cell.run for cell in cells]
    with LocalQueue(manner, room, terminal=alone) as queue:
        waiting_room.put(runs)
        try:
            while True:
                for cell in list(waiting):
                    if queue.has_room(cell):
                        waiting.remove(cell)
                        _start(cell, queue, waiting, told, ended)
                one = queue.wait_one()
                if one is None:
                    return not waiting
                ended(one)
                told.ended(one, len(queue.running), len(waiting))
        finally:
            waiting_room.clear(runs)


def _start(
    cell: Cell,
    queue: LocalQueue,
    waiting: list[Cell],
    told: _Told,
    ended: Callable[[PointEnded], None],
) -> None:
    """Start a point that has room, unless `cancel SWEEP/5` was quicker."""
    if not take(cell.run):
        one = PointEnded(cell=cell, exit_code=EXIT_STOPPED, refusal=NOT_BEGUN)
        ended(one)
        told.ended(one, len(queue.running), len(waiting))
        return
    told.starts(cell)
    if not queue.start(cell):  # an interrupt, or memory that went to somebody else meanwhile
        waiting_room.put([cell.run])
        waiting.append(cell)


def most_at_once(configs: Sequence[Config], manner: Manner) -> int | None:
    """As `sweep.parallel` says; `auto` is one where points differ in what sets their speed, for
    then it is their times that are compared.
    """
    first, *others = configs
    asked = at_once(first.sweep.parallel)
    unlike = [n for n in TIMED if any(getattr(c, n) != getattr(first, n) for c in others)]
    if asked is not None or not unlike:
        return asked
    if not manner.quiet:
        say(
            manner.console,
            f"one point after another, since they differ in {', '.join(unlike)}, and their times "
            f"are compared; sweep.parallel=2 runs two at once",
            "dim", prose=True,
        )  # fmt: skip
    return 1


def _work(cell: Cell) -> float:
    """How much a point computes, so that the long ones begin first and none is left over alone:
    samples, or epochs where the number of samples is not known yet.
    """
    plan = cell.point.plan
    if isinstance(plan, ProgramPlan):
        return 0.0
    if plan.updates is None:
        return cell.point.config.train.epochs or 0.0
    return float(plan.updates * plan.batch.global_batch)


class _Told:
    """What the terminal shows. A point that has it to itself speaks for itself.

    Args:
        alone: there is never more than one.
    """

    def __init__(self, manner: Manner, cells: Sequence[Cell], *, alone: bool) -> None:
        self._manner, self._alone = manner, alone
        varying = only_varying([cell.point.overrides for cell in cells])
        self._names: dict[Path, str] = {}
        for cell, overrides in zip(cells, varying, strict=True):
            words = " ".join(f"{key}={value}" for key, value in overrides.items())
            self._names[cell.run.path] = f"point {cell.run.path.name} ({words})"

    def starts(self, cell: Cell) -> None:
        if self._alone:
            say(self._manner.console, cell.point.words, "bold")
        elif not self._manner.quiet:
            say(self._manner.console, f"{self._names[cell.run.path]} starts", "dim")

    def ended(self, one: PointEnded, running: int, waiting: int) -> None:
        name = self._names[one.cell.run.path]
        if one.refusal is not None:
            say(self._manner.console, f"{name}: {one.refusal}", "bold red")
        elif not self._alone and not (self._manner.quiet and one.exit_code == EXIT_FINISHED):
            left = f"{running} running, {waiting} waiting" if running or waiting else "the last"
            style = "green" if one.exit_code == EXIT_FINISHED else "bold red"
            say(self._manner.console, f"{name}: {_came_of(one)} ({left})", style)


def _came_of(one: PointEnded) -> str:
    """How a point ended, and what it measured, in a few words."""
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
