# ruff: noqa: RUF001, RUF002 - the signs are meant, and have stand-ins where they cannot be shown.
"""What `status RUN` shows of one run: where it stands, its loss, what its ranks warned of."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from orchestrator.report.tables.status_table import STYLES, UNREADABLE, Shown, remark, updates_done
from orchestrator.report.terminal import command, literal, say
from orchestrator.units import (
    format_count,
    format_learning_rate,
    format_number,
    format_rate,
    format_seconds,
    plural,
)

BARS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "×"
SPARKS = 40
LABEL_CELLS = 24
WARNINGS_SHOWN = 5


def sparkline(values: Sequence[float]) -> str:
    """A character for each value, from the lowest to the highest of them.

    >>> sparkline([4.0, 2.0, 1.0, float("nan"), 1.0]), sparkline([3.0, 3.0]), sparkline([])
    ('█▃▁×▁', '▁▁', '')
    """
    finite = [value for value in values if math.isfinite(value)]
    lowest, highest = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BARS) - 1) / (highest - lowest) if highest > lowest else 0.0
    return "".join(
        BARS[round((value - lowest) * scale)] if math.isfinite(value) else NOT_FINITE
        for value in values
    )


def points_wanted(console: Console) -> int:
    """How many points of the loss's course there is room for."""
    return max(8, min(SPARKS, console.width - LABEL_CELLS))


def print_run(run: Shown, course: Sequence[float], console: Console) -> None:
    """Print one run.

    Args:
        course: its losses from the beginning to now, at even distances.
    """
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value, style in _rows(run, course):
        table.add_row(literal(label, console), literal(value, console, style))
    console.print(table)
    _print_warnings(run.warnings, console)
    say(console, f"run folder: {run.folder}")
    if run.state in ("stopped", "lost", "failed", "cancelled"):
        say(console, f"to go on from here: {command('resume', run.folder)}", "bold")


def _rows(run: Shown, course: Sequence[float]) -> list[tuple[str, str, str]]:
    style = STYLES.get(run.state, "")
    where = [f"job {run.job_id}"] if run.job_id else []
    where += [f"on {run.nodes}"] if run.nodes else []
    rows = [("state", " ".join([run.state, *where]), style)]
    if said := remark(run):
        rows.append(("", said, style if run.reason else "dim"))
    if run.state in UNREADABLE:
        return rows
    if run.program:
        rows.append(("program", run.program, ""))
    rows.append(("updates", updates_done(run), ""))
    if run.loss is not None:
        rows.append(("loss", format_number(run.loss), "bold"))
    if len(course) > 1:
        rows.append(("  so far", sparkline(course), "cyan"))
        rows.append(("", f"from {format_number(course[0])} to {format_number(course[-1])}", "dim"))
    rows += [(f"held-out {name}", format_number(v), "") for name, v in run.evaluation.items()]
    if run.learning_rate is not None:
        rows.append(("learning rate", format_learning_rate(run.learning_rate), ""))
    if run.samples_per_second is not None:
        rows.append(("speed", format_rate(run.samples_per_second), ""))
    if run.boundary_age_s is not None:
        rows.append(("last boundary", f"{format_seconds(run.boundary_age_s)} ago", ""))
    if run.seconds_left is not None and run.state == "running":
        rows.append(("to the end", f"about {format_seconds(run.seconds_left)}", ""))
    if run.time_left_s is not None:
        rows.append(("job's time left", format_seconds(run.time_left_s), ""))
    if run.attempts > 1:
        resumed = run.attempts - 1 - run.restarts
        parts = [plural(run.restarts, "restart")] if run.restarts else []
        parts += [f"resumed {plural(resumed, 'time')}"] if resumed else []
        rows.append(("attempts", f"{format_count(run.attempts)}: {', '.join(parts)}", ""))
    return rows


def _print_warnings(warnings: Sequence[str], console: Console) -> None:
    more = len(warnings) - WARNINGS_SHOWN
    if more > 0:
        say(console, f"{plural(more, 'earlier warning')}: in metrics.jsonl", "dim", prose=True)
    for sentence in warnings[-WARNINGS_SHOWN:]:
        say(console, f"warning: {sentence}", "yellow", prose=True)
