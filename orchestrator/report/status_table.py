# ruff: noqa: RUF001 - the signs are meant, and have stand-ins where they cannot be shown.
"""The table of `status`: a line for each run; below it why one waits, failed or started again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from orchestrator.report.terminal import literal, say
from orchestrator.report.units import format_count, format_seconds, plural

WIDEST = 400
STYLES = {
    "finished": "green", "running": "bold green", "starting": "cyan", "ending": "cyan",
    "pending": "yellow", "stopped": "yellow", "cancelled": "yellow", "failed": "bold red",
    "lost": "bold red", "unknown": "red",
}  # fmt: skip
HEADINGS = (
    "run", "state", "job", "nodes", "updates", "samples/s", "last boundary", "restarts", "time left"
)  # fmt: skip


class Shown(Protocol):
    """What the table shows of a run; see `orchestrator.submit.status.RunStatus`."""

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
    def samples_per_second(self) -> float | None: ...
    @property
    def boundary_age_s(self) -> float | None: ...
    @property
    def restarts(self) -> int: ...
    @property
    def lost_updates(self) -> int: ...
    @property
    def why(self) -> str | None: ...
    @property
    def time_left_s(self) -> float | None: ...
    @property
    def reason(self) -> str | None: ...


def short_name(folder: Path, here: Path) -> str:
    """A folder as seen from here.

    >>> short_name(Path("/a/runs/x"), Path("/a")), short_name(Path("/b/x"), Path("/a"))
    ('runs/x', '/b/x')
    """
    return str(folder.relative_to(here)) if folder.is_relative_to(here) else str(folder)


def _cells(run: Shown, here: Path) -> list[str]:
    of = f"/{format_count(run.total)}" if run.total is not None else ""
    rate, age, left = run.samples_per_second, run.boundary_age_s, run.time_left_s
    return [
        short_name(run.folder, here),
        run.state,
        run.job_id or "–",
        run.nodes or "–",
        f"{format_count(run.updates)}{of}",
        f"{rate:,.0f}" if rate is not None else "–",
        f"{format_seconds(age)} ago" if age is not None else "–",
        format_count(run.restarts),
        format_seconds(left) if left is not None else "–",
    ]


def _remark(run: Shown) -> str | None:
    """What does not fit a column."""
    if run.reason:
        return run.reason
    if run.restarts and run.why:
        lost = f", {plural(run.lost_updates, 'update')} done again" if run.lost_updates else ""
        return f"last restart: {run.why}{lost}"
    return None


def print_status(runs: Sequence[Shown], console: Console, here: Path) -> None:
    """Print where runs stand."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in HEADINGS:
        right = heading in ("updates", "samples/s", "restarts")
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    for run in runs:
        cells = [literal(text, console) for text in _cells(run, here)]
        cells[1] = literal(run.state, console, STYLES.get(run.state, ""))
        table.add_row(*cells)
    # Names of runs and node lists stay whole and can be copied, however narrow the terminal.
    wide = console.options.update(max_width=WIDEST)
    present = console.width
    console.width = max(present, Measurement.get(console, wide, table).maximum)
    console.print(table, crop=False)
    console.width = present
    for run in runs:
        remark = _remark(run)
        if remark:
            style = STYLES.get(run.state, "") if run.state in ("failed", "lost") else "dim"
            say(console, f"{short_name(run.folder, here)}: {remark}", style, prose=True)
