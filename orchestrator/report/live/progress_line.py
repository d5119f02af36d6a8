"""The one line that shows where a run is, fitted to the width there is.

Pure: a `Moment` in, text out. What matters most is kept longest: first the bar gives way, then the
dots become figures, then rates go; update and loss stay at any width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from orchestrator.report.terminal import harmless, legible
from orchestrator.units import format_count, format_number, format_rate, format_seconds

MOST_DOTS = 16
FEW_DOTS = 8
BAR_CELLS = (8, 40)
GAP = "  "


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Where a run is. None means not known yet."""

    updates: int
    total: int | None
    loss: float | None = None
    samples_per_second: float | None = None
    seconds_per_update: float | None = None
    micro_steps: int = 1
    micro_steps_done: int | None = None
    evaluation: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def seconds_left(self) -> float | None:
        """Until the last update, at the recent pace; 0 at the end."""
        if self.total is None or self.seconds_per_update is None:
            return None
        return max(0, self.total - self.updates) * self.seconds_per_update


def plain_line(moment: Moment) -> str:
    """The line without bar and dots, for logs and pipes.

    >>> plain_line(Moment(updates=2, total=9, loss=0.5, samples_per_second=80.0))
    'update 2/9  loss 0.5000  80.0 samples/s'
    """
    return GAP.join(part for part in (_position(moment), *_figures(moment)) if part)


def live_line(moment: Moment, console: Console) -> Text:
    """The line with bar and micro-step dots, at most one cell narrower than the console.

    The last column stays free: some terminals break the line when it is written to.
    """
    width = console.width - 1
    line, for_bar = Text(""), 0
    for parts, wants_bar in _candidates(moment):
        line = Text(GAP).join(part for part in parts if part.plain)
        for_bar = width - line.cell_len - len(GAP)
        if for_bar >= (BAR_CELLS[0] if wants_bar else -len(GAP)):
            break
    bar = _bar(moment, for_bar)
    if bar is not None:
        at = len(_position(moment))
        line = Text.assemble(line[:at], GAP, bar, line[at:])
    # One cell for one, so that the styles stay where they belong.
    line.plain = legible(line.plain, console)
    line.truncate(width, overflow="crop")
    line.no_wrap = True
    return line


def _candidates(moment: Moment) -> Iterator[tuple[list[Text], bool]]:
    """What the line can hold, richest first, and whether that needs room for a bar as well."""
    position = Text(_position(moment), style="bold")
    loss, rate, left = (Text(part) for part in _figures(moment))
    dots, figures = _dots(moment), _micro_figures(moment)
    values = (f"{harmless(k)} {format_number(v)}" for k, v in moment.evaluation.items())
    held_out = Text(", ".join(values).replace("\n", " "), style="green")
    bar = moment.total is not None
    yield [position, loss, held_out, rate, left, dots], bar
    yield [position, loss, rate, left, dots], bar
    yield [position, loss, rate, left, figures], bar
    yield [position, loss, rate, left, figures], False
    yield [position, loss, left, figures], False
    yield [position, loss, left], False
    yield [position, loss], False


def _position(moment: Moment) -> str:
    if moment.total is None:
        return f"update {moment.updates}"
    return f"update {moment.updates:>{len(str(moment.total))}}/{moment.total}"


def _figures(moment: Moment) -> tuple[str, str, str]:
    """Loss, rate and time left; empty where not known."""
    loss = "" if moment.loss is None else f"loss {format_number(moment.loss)}"
    speed = moment.samples_per_second
    rate = "" if speed is None else format_rate(speed)
    left = moment.seconds_left
    if not left:
        return loss, rate, ""
    # Fractions of a second would only flicker.
    whole = math.ceil(left)
    return loss, rate, f"{format_seconds(whole) if whole >= 60 else f'{whole} s'} left"


def _dots(moment: Moment) -> Text:
    """One dot per micro-step of the window; when too many to count by eye, a few and figures."""
    if moment.micro_steps_done is None or moment.micro_steps == 1:
        return Text("")
    total = moment.micro_steps
    done = min(moment.micro_steps_done, total)
    if total <= MOST_DOTS:
        return Text.assemble(("●" * done, "cyan"), ("○" * (total - done), "dim"))
    full = FEW_DOTS * done // total
    figures = f" {format_count(done):>{len(format_count(total))}}/{format_count(total)}"
    return Text.assemble(("●" * full, "cyan"), ("○" * (FEW_DOTS - full), "dim"), figures)


def _micro_figures(moment: Moment) -> Text:
    if moment.micro_steps_done is None or moment.micro_steps == 1:
        return Text("")
    total = format_count(moment.micro_steps)
    done = format_count(min(moment.micro_steps_done, moment.micro_steps))
    return Text(f"micro {done:>{len(total)}}/{total}", style="cyan")


def _bar(moment: Moment, room: int) -> Text | None:
    """The bar, when the end is known and there is room for one that says something."""
    if moment.total is None or moment.total <= 0 or room < BAR_CELLS[0]:
        return None
    width = min(room, BAR_CELLS[1])
    full = min(width, width * moment.updates // moment.total)
    return Text.assemble(("━" * full, "green"), ("─" * (width - full), "dim"))
