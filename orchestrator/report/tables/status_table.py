# ruff: noqa: RUF001 - the signs are meant, and have stand-ins where they cannot be shown.
"""What `status` shows of many runs: a table, or where that does not fit, a few lines for each run.

Below each run stands why it waits, failed, started again, or cannot be read.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from orchestrator.report.terminal import legible, literal, say
from orchestrator.units import format_count, format_seconds, plural

STYLES = {
    "finished": "green", "running": "bold green", "starting": "cyan", "ending": "cyan",
    "pending": "yellow", "stopped": "yellow", "pruned": "yellow", "cancelled": "yellow",
    "failed": "bold red", "lost": "bold red", "unknown": "red", "private": "dim",
    "damaged": "bold red",
}  # fmt: skip
URGENT = ("failed", "lost", "damaged")
HEADINGS = (
    "run", "state", "job", "nodes", "updates", "samples/s", "last boundary", "restarts", "time left"
)  # fmt: skip
ALWAYS = ("run", "state", "updates")
RIGHT = ("updates", "samples/s", "restarts")
UNREADABLE = ("private", "damaged")
NONE = "–"


class Shown(Protocol):
    """What is shown of a run; see `orchestrator.rundir.status.RunStatus`."""

    @property
    def folder(self) -> Path: ...
    @property
    def state(self) -> str: ...
    @property
    def job_id(self) -> str | None: ...
    @property
    def nodes(self) -> str: ...
    @property
    def updates(self) -> int: ...
    @property
    def total(self) -> int | None: ...
    @property
    def loss(self) -> float | None: ...
    @property
    def learning_rate(self) -> float | None: ...
    @property
    def evaluation(self) -> dict[str, Any]: ...
    @property
    def samples_per_second(self) -> float | None: ...
    @property
    def seconds_left(self) -> float | None: ...
    @property
    def boundary_age_s(self) -> float | None: ...
    @property
    def attempts(self) -> int: ...
    @property
    def restarts(self) -> int: ...
    @property
    def survived(self) -> int: ...
    @property
    def came_back(self) -> int: ...
    @property
    def lost_updates(self) -> int: ...
    @property
    def why(self) -> str | None: ...
    @property
    def program(self) -> str | None: ...
    @property
    def time_left_s(self) -> float | None: ...
    @property
    def reason(self) -> str | None: ...
    @property
    def culprit(self) -> str | None: ...
    @property
    def warnings(self) -> list[str]: ...


def short_name(folder: Path, here: Path) -> str:
    """A folder as seen from here.

    >>> short_name(Path("/a/runs/x"), Path("/a")), short_name(Path("/b/x"), Path("/a"))
    ('runs/x', '/b/x')
    """
    return str(folder.relative_to(here)) if folder.is_relative_to(here) else str(folder)


def updates_done(run: Shown) -> str:
    """Updates done, of how many where that is known; a program need not say."""
    if run.program and not run.updates:
        return NONE
    of = f"/{format_count(run.total)}" if run.total is not None else ""
    return f"{format_count(run.updates)}{of}"


def _cells(run: Shown, here: Path) -> list[str]:
    name = short_name(run.folder, here)
    if run.state in UNREADABLE:
        return [name, run.state, *[NONE] * (len(HEADINGS) - 2)]
    rate, age, left = run.samples_per_second, run.boundary_age_s, run.time_left_s
    return [
        name,
        run.state,
        run.job_id or NONE,
        run.nodes or NONE,
        updates_done(run),
        f"{rate:,.0f}" if rate is not None else NONE,
        f"{format_seconds(age)} ago" if age is not None else NONE,
        format_count(run.restarts) if run.restarts else NONE,
        format_seconds(left) if left is not None else NONE,
    ]


def remark(run: Shown) -> str | None:
    """What does not fit a column: the reason of its state, or of its latest restart."""
    if run.reason:
        said = run.reason.replace(f"{run.folder}/", "").replace(str(run.folder), "it")
        return f"{run.culprit}: {said}" if run.culprit else said
    if run.survived:
        lost = f"ranks were lost {plural(run.survived, 'time')}, and the others went on"
        return f"{lost}; {plural(run.came_back, 'rank')} came back" if run.came_back else lost
    if run.restarts and run.why:
        lost = f", {plural(run.lost_updates, 'update')} done again" if run.lost_updates else ""
        return f"last restart: {run.why}{lost}"
    return None


def print_status(runs: Sequence[Shown], console: Console, here: Path) -> None:
    """Print where runs stand. Names of runs stay whole, however narrow the terminal."""
    rows = [_cells(run, here) for run in runs]
    lines = _lines(runs, rows, console)
    if console.is_terminal and max(line.cell_len for line in lines) > console.width:
        for run, cells in zip(runs, rows, strict=True):
            _print_block(run, cells, console)
        return
    # All at once: a print for each line takes longer than all else, for a thousand points.
    console.print(*lines, sep="\n", soft_wrap=True, highlight=False)
    remarks: list[Text] = []
    for run in runs:
        if said := remark(run):
            style = STYLES.get(run.state, "") if run.state in URGENT else "dim"
            remarks.append(literal(f"{short_name(run.folder, here)}: {said}", console, style))
    if remarks:
        whole = not console.is_terminal  # prose, as `say` breaks it
        console.print(*remarks, sep="\n", soft_wrap=whole, highlight=False)


def _lines(runs: Sequence[Shown], rows: Sequence[Sequence[str]], console: Console) -> list[Text]:
    """A line for each run, below the headings; columns in which nothing stands are left out.

    No rich table: that takes half a second for a sweep of a thousand points.
    """
    kept = [
        place
        for place, heading in enumerate(HEADINGS)
        if heading in ALWAYS or any(row[place] != NONE for row in rows)
    ]
    shown = cache(partial(legible, console=console))
    columns = [[HEADINGS[place], *(shown(row[place]) for row in rows)] for place in kept]
    wide = [max(map(cell_len, column)) for column in columns]
    right = [HEADINGS[place] in RIGHT for place in kept]
    styles = ["dim", *(STYLES.get(run.state, "") for run in runs)]
    lines: list[Text] = []
    for cells, style in zip(zip(*columns, strict=True), styles, strict=True):
        space = [" " * (width - cell_len(cell)) for width, cell in zip(wide, cells, strict=True)]
        padded = [s + c if r else c + s for s, c, r in zip(space, cells, right, strict=True)]
        line = Text("  ".join(padded).rstrip(), style="" if lines else style)
        if lines:  # a run's state, the second column, has a colour
            begin = len(padded[0]) + 2
            line.stylize(style, begin, begin + len(cells[1]))
        lines.append(line)
    return lines


def _print_block(run: Shown, cells: Sequence[str], console: Console) -> None:
    """One run where the table is too wide: its name, and below it what is known of it."""
    say(console, cells[0], "bold")
    facts = [literal(run.state, console, STYLES.get(run.state, ""))]
    for heading, cell in zip(HEADINGS[2:], cells[2:], strict=True):
        if cell != NONE:
            named = cell if heading in ("nodes", "samples/s") else f"{heading} {cell}"
            facts.append(literal(f"{cell} samples/s" if heading == "samples/s" else named, console))
    for line in packed(facts, console.width - 2):
        console.print(Text("  ").append_text(line), soft_wrap=True, highlight=False)
    if said := remark(run):
        style = STYLES.get(run.state, "") if run.state in URGENT else "dim"
        # Long words, as paths are, stay whole.
        width = max(8, console.width - 2)
        for line in textwrap.wrap(said, width, break_long_words=False, break_on_hyphens=False):
            say(console, f"  {line}", style)


def packed(facts: Sequence[Text], width: int) -> list[Text]:
    """Facts side by side, as many to a line as fit; none is ever broken.

    >>> [line.plain for line in packed([Text("ab"), Text("cd"), Text("ef")], 7)]
    ['ab  cd', 'ef']
    """
    lines: list[Text] = []
    for fact in facts:
        if lines and lines[-1].cell_len + 2 + fact.cell_len <= width:
            lines[-1].append("  ").append_text(fact)
        else:
            lines.append(fact.copy())
    return lines
