"""Progress of a run while it trains, as a live line or as plain lines."""

from __future__ import annotations

import importlib
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from orchestrator.report.terminal import harmless, legible, literal, say
from orchestrator.rundir.best import BestFigure, BestSoFar
from orchestrator.rundir.metrics import PACE_UPDATES, Kind, Record, recent_pace
from orchestrator.units import format_count, format_number, format_rate, format_seconds, plural

MOST_DOTS = 16
BAR_CELLS = (8, 40)
GAP = "  "


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The state of a run at one moment. None: not known yet."""

    updates: int
    total: int | None
    loss: float | None = None
    samples_per_second: float | None = None
    seconds_left: float | None = None  # until the last update, at the recent pace
    micro_steps: int = 1
    micro_steps_done: int | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of the last update
    best: BestFigure | None = None
    evaluation: Mapping[str, Any] = field(default_factory=dict[str, Any])


def plain_line(moment: Moment) -> str:
    """Return the line without bar and dots, for logs and pipes.

    >>> plain_line(Moment(updates=2, total=9, loss=0.5, samples_per_second=80.0))
    'update 2/9  loss 0.5000  80.0 samples/s'
    """
    loss, *pace = _figures(moment)
    parts = (_position(moment), loss, _named(moment.metrics), *pace)
    return GAP.join(part for part in parts if part)


def live_line(moment: Moment, console: Console) -> Text:
    """Return the line with bar and micro-step dots, at most one cell narrower than the console.

    Where it is too long, its least important parts are left out. The last column stays free: some
    terminals break the line when it is written to.
    """
    loss, rate, time_left = map(Text, _figures(moment))
    metrics = Text(_named(moment.metrics))
    figures = _named(moment.evaluation)
    evaluation = Text(f"held-out {figures}" if figures else "", style="green")
    best = Text(_best(moment.best), style="green")
    position, dots = Text(_position(moment), style="bold"), _dots(moment)
    parts = [position, loss, metrics, evaluation, best, rate, time_left, dots]
    parts = [part for part in parts if part.plain]
    width = console.width - 1 - (BAR_CELLS[0] + len(GAP) if moment.total else 0)
    for least in (metrics, evaluation, best, dots, rate, time_left):
        if Text(GAP).join(parts).cell_len <= width:
            break
        parts = [part for part in parts if part is not least]
    room = console.width - 1 - Text(GAP).join(parts).cell_len - len(GAP)
    if moment.total and room >= BAR_CELLS[0]:
        cells = min(room, BAR_CELLS[1])
        full = min(cells, cells * moment.updates // moment.total)
        parts.insert(1, Text.assemble(("━" * full, "green"), ("─" * (cells - full), "dim")))
    line = Text(GAP).join(parts)
    # One cell for one, so that the styles stay where they belong.
    line.plain = legible(line.plain, console)
    line.truncate(console.width - 1, overflow="crop")
    line.no_wrap = True
    return line


def _position(moment: Moment) -> str:
    if moment.total is None:
        return f"update {moment.updates}"
    return f"update {moment.updates:>{len(str(moment.total))}}/{moment.total}"


def _named(figures: Mapping[str, Any]) -> str:
    """Return figures with their names, on one line.

    >>> _named({"right": 0.5, "found": 1})
    'right 0.5000, found 1'
    """
    values = (f"{harmless(name)} {format_number(value)}" for name, value in figures.items())
    return ", ".join(values).replace("\n", " ")


def _best(best: BestFigure | None) -> str:
    """Return the best figure, with its name; empty before the first evaluation."""
    return "" if best is None or not best.updates else f"best {_named({best.name: best.value})}"


def _figures(moment: Moment) -> tuple[str, str, str]:
    """Return loss, rate and time left; empty where not known."""
    loss = "" if moment.loss is None else f"loss {format_number(moment.loss)}"
    speed = moment.samples_per_second
    rate = "" if speed is None else format_rate(speed)
    seconds = math.ceil(moment.seconds_left or 0)  # fractions of a second would only flicker
    text = f"{format_seconds(seconds) if seconds >= 60 else f'{seconds} s'} left" if seconds else ""
    return loss, rate, text


def _dots(moment: Moment) -> Text:
    """Return a dot for each micro-step of the window; figures where there are many."""
    if moment.micro_steps_done is None or moment.micro_steps == 1:
        return Text("")
    total = moment.micro_steps
    done = min(moment.micro_steps_done, total)
    if total > MOST_DOTS:
        return Text(f"{format_count(done):>{len(format_count(total))}}/{format_count(total)}")
    return Text.assemble(("●" * done, "cyan"), ("○" * (total - done), "dim"))


class NotebookLine:
    """A line in a notebook's output that is replaced as it changes: `Live` needs ipywidgets."""

    def __init__(self, line: Text) -> None:
        self._line, self._handle = line, None

    def start(self, refresh: bool) -> None:
        """Show the line."""
        del refresh
        display = importlib.import_module("IPython.display").display
        self._handle = display({"text/plain": self._line.plain}, raw=True, display_id=True)

    def update(self, line: Text, refresh: bool) -> None:
        """Show another line in its place, if it is another one."""
        del refresh
        if self._handle is not None and line.plain != self._line.plain:
            self._line = line
            self._handle.update({"text/plain": line.plain}, raw=True)

    def stop(self) -> None:
        """Leave the line as it is."""


PLAIN_INTERVAL_S = 2.0


class Progress:
    """Shows a run from what its folder says. Use as a context manager, or call `close` always.

    `plan` gives `updates`, `micro_steps`, `ranks` and `nodes`; any of them may be missing. `live`
    overrides the choice between one live line and plain lines, `clock` (seconds) is for tests.
    `best` follows the figure of `train.keep_best`, and knows the evaluations before.
    """

    def __init__(
        self,
        plan: Mapping[str, Any],
        console: Console,
        quiet: bool = False,
        verbose: bool = False,
        *,
        best: BestSoFar | None = None,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan, self._console, self._clock = plan, console, clock
        self._quiet, self._verbose = quiet, verbose
        # Only what the line needs: a month's run must not make its watcher grow or slow down.
        self._recent: deque[Record] = deque(maxlen=PACE_UPDATES)
        self._evaluation: Record = {}
        self._best = best
        self._window: tuple[int, int] | None = None  # micro-steps done, and of how many
        self._closed = False
        self._shown: int | None = None
        self._shown_at = 0.0
        self._live: Live | NotebookLine | None = None
        # FORCE_COLOR makes a file look like a terminal to rich, so the stream itself is asked too:
        # cursor movements spoil a log.
        redrawn = console.is_terminal and not console.is_dumb_terminal and console.file.isatty()
        if not quiet and (redrawn or console.is_jupyter if live is None else live):
            line = self._line()
            notebook = console.is_jupyter
            self._live = (
                NotebookLine(line) if notebook else Live(line, console=console, auto_refresh=False)
            )
            self._live.start(refresh=True)
        elif not quiet:
            say(console, self._waiting())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def update(
        self,
        records: Sequence[Record],
        micro_steps: tuple[int, int] | None = None,
        warnings: Sequence[str] = (),
    ) -> None:
        """Show new `records` of `metrics.jsonl`, and the micro-steps done in the open window.

        Args:
            micro_steps: how many are done, and of how many; None if not known.
        """
        if self._quiet:
            return
        for sentence in warnings:
            self._say(f"warning: {sentence}")
        for record in records:
            if Kind.of(record) not in (Kind.UPDATE, Kind.EVALUATION):
                continue
            self._add(record)
            # A live line has the latest evaluation; a job need not evaluate.
            if self._verbose or (self._live is None and record.get("evaluation")):
                if "evaluation" in record:
                    updates, best = record["update"] + 1, self._best and self._best.figure
                    sentence = f"held-out after update {updates}: {_named(record['evaluation'])}"
                    if best is not None and best.updates:
                        after = f"{_best(best)} after update {best.updates}"
                        sentence += ", the best so far" if best.updates == updates else f"; {after}"
                    self._say(sentence)
                else:
                    self._say(plain_line(self._moment()))
        if micro_steps is None and self._window is not None:
            # Dots that vanish between two windows would make the line jump.
            micro_steps = (0, self._plan.get("micro_steps") or 1)
        self._window = micro_steps
        if self._live is not None:
            self._live.update(self._line(), refresh=True)
        elif not self._verbose:
            last = self._recent and self._recent[-1]["update"] + 1 == self._plan.get("updates")
            due = self._clock() - self._shown_at >= PLAIN_INTERVAL_S
            if self._shown is None or last or due:
                self._show_last()

    def close(self) -> None:
        """Leave the last state on the screen and give the terminal back. May be called twice."""
        self._closed, self._window = True, None
        if self._live is not None:
            self._live.update(self._line(), refresh=True)
            self._live.stop()
            self._live = None
        elif not self._quiet and not self._verbose:
            self._show_last()
        self._quiet = True

    def _add(self, record: Record) -> None:
        if "evaluation" in record:
            self._evaluation = record["evaluation"]
            if self._best is not None:
                self._best.add(record["update"] + 1, record["evaluation"])
            return
        if self._recent:
            last = self._recent[-1]
            if record.get("attempt", 0) < last.get("attempt", 0):
                return
            # After a resume neither the pace nor the pause in between says anything.
            resumed = record.get("attempt", 0) > last.get("attempt", 0)
            if resumed or record["update"] <= last["update"]:
                self._recent.clear()
        self._recent.append(record)

    def _show_last(self) -> None:
        if self._recent and self._recent[-1]["update"] != self._shown:
            self._shown, self._shown_at = self._recent[-1]["update"], self._clock()
            self._say(plain_line(self._moment()))

    def _say(self, line: str) -> None:
        say(self._console, line, prose=True)

    def _line(self) -> Text:
        if not self._recent and self._window is None:
            line = literal(self._waiting(), self._console, "dim")
            line.no_wrap, line.overflow = True, "ellipsis"
            return line
        return live_line(self._moment(), self._console)

    def _waiting(self) -> str:
        ranks, nodes = self._plan.get("ranks"), self._plan.get("nodes")
        if ranks is None:
            return "starting"
        on = "" if nodes is None else f" on {plural(nodes, 'node')}"
        if program := self._plan.get("program"):
            return f"{program['argv'][0]} on {plural(ranks, 'rank')}{on}"
        return f"starting {plural(ranks, 'rank')}{on}"

    def _moment(self) -> Moment:
        last: Record = self._recent[-1] if self._recent else {}
        pace = recent_pace(self._recent)
        done, total = last["update"] + 1 if last else 0, self._plan.get("updates")
        samples = [r["samples"] for r in self._recent if r.get("samples") is not None]
        mean_samples = sum(samples) / len(samples) if samples else None
        seconds_left = None
        # Nothing is left to wait for once the run is over, however far it came.
        if pace is not None and total is not None and not self._closed:
            seconds_left = max(0, total - done) * pace
        steps_done, steps = self._window or (None, 1)
        return Moment(
            updates=done,
            total=total,
            loss=last.get("loss"),
            samples_per_second=mean_samples / pace if pace and mean_samples else None,
            seconds_left=seconds_left,
            micro_steps=steps,
            micro_steps_done=steps_done,
            metrics=last.get("metrics") or {},
            best=self._best and self._best.figure,
            evaluation=self._evaluation,
        )
