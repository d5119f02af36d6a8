"""A rehearsal as a table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from orchestrator.rehearse.playing import Rehearsal
from orchestrator.report.terminal import say

COLUMNS = ("fault", "run", "update", "noticed", "at work", "how", "redone", "lost", "equal")


def print_rehearsal(found: Rehearsal, console: Console) -> None:
    """A line for each fault, and what the columns mean."""
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        words = name in ("fault", "run", "how")
        table.add_column(name, justify="left" if words else "right", no_wrap=name != "fault")
    for row in found.rows:
        cells = (
            row.fault, row.run, str(row.update), _seconds(row.noticed_s),
            _seconds(row.recovered_s), row.how, str(row.redone), str(row.samples_lost),
            "yes" if row.equal else "NO",
        )  # fmt: skip
        table.add_row(*cells)
    console.print(table)
    say(
        console,
        "noticed, at work: seconds from the fault until the run knew of it, and until its next "
        f"update was done; redone: updates; lost: samples; equal: {found.equality}",
        "dim",
        prose=True,
    )


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"
