# ruff: noqa: RUF002 - the multiplication sign is what is printed.
"""What accumulation costs and saves here: K = 1 beside K > 1, fairly, twice.

At equal micro-batch the two do different amounts of work an update; at equal global batch they do
the same. Both are shown, since each alone can be used to claim too much. Every sentence is made
from the figures of these runs: nothing is said about other machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from orchestrator.report.tables.sweep_table import SweptRun
from orchestrator.report.terminal import literal, say
from orchestrator.rundir.metrics import Summary
from orchestrator.units import (
    format_bytes,
    format_count,
    format_number,
    format_ratio,
    format_seconds,
)

SAME_WITHIN = 0.03


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two runs that are alike but for K: `one` with fewer micro-steps, `many` with more.

    `title` says what was kept equal, for example `equal micro-batch`. Plans of the cells give
    `micro_steps`, `global_batch` and `micro_batches`.
    """

    title: str
    one: SweptRun
    many: SweptRun


def print_time_and_memory(pairs: Sequence[Pair], console: Console) -> None:
    """Print a table and one sentence for each pair."""
    for pair in pairs:
        console.print(_table(pair, console))
        say(console, verdict(pair), prose=True)
        say(console, "")
    say(
        console,
        "One run of each on this machine; a ratio near 1.00 may be chance.",
        "dim",
        prose=True,
    )


def verdict(pair: Pair) -> str:
    """What the figures say, in one sentence: time of an update and of a sample, and memory."""
    one, many = pair.one.summary, pair.many.summary
    k = f"K={pair.many.plan.get('micro_steps', '?')}"
    unfinished = [cell for cell in (pair.one, pair.many) if not cell.finished]
    if unfinished:
        return f"At {pair.title}: nothing can be said, {unfinished[0].title} did not finish."
    per_update = _ratio(many.seconds_per_update, one.seconds_per_update)
    per_sample = _ratio(_seconds_per_sample(many), _seconds_per_sample(one))
    memory = _ratio(many.peak_memory_bytes, one.peak_memory_bytes)
    return (
        f"At {pair.title}, {k} against K={pair.one.plan.get('micro_steps', '?')}: "
        f"{_change('time per update', per_update)}, {_change('time per sample', per_sample)}, "
        f"{_change('peak memory', memory)}."
    )


def _change(what: str, ratio: float | None) -> str:
    """Up, down or about the same, with the figure that says so.

    >>> _change("peak memory", 0.4), _change("time", 1.01), _change("time", None)
    ('peak memory down (0.40×)', 'time about the same (1.01×)', 'time unknown')
    """
    if ratio is None:
        return f"{what} unknown"
    if abs(ratio - 1) <= SAME_WITHIN:
        return f"{what} about the same ({format_ratio(ratio)})"
    return f"{what} {'up' if ratio > 1 else 'down'} ({format_ratio(ratio)})"


def _table(pair: Pair, console: Console) -> Table:
    table = Table(
        title=literal(pair.title, console, "bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("", overflow="fold")
    for cell in (pair.one, pair.many):
        table.add_column(f"K={cell.plan.get('micro_steps', '?')}", justify="right")
    table.add_column("ratio", justify="right")
    for row in _rows(pair):
        table.add_row(*(literal(text, console) for text in row))
    return table


def _rows(pair: Pair) -> list[tuple[str, str, str, str]]:
    cells, figures = (pair.one, pair.many), (pair.one.summary, pair.many.summary)
    one, many = figures

    def row(
        name: str, values: tuple[float | None, float | None], text: str = "count"
    ) -> tuple[str, str, str, str]:
        form = {"count": format_count, "seconds": format_seconds, "bytes": format_bytes}[text]
        return name, form(values[0]), form(values[1]), format_ratio(_ratio(values[1], values[0]))

    rows = [
        ("state", one.state, many.state, ""),
        row("global batch", (cells[0].plan.get("global_batch"), cells[1].plan.get("global_batch"))),
        row("largest micro-batch", (_micro_batch(cells[0]), _micro_batch(cells[1]))),
        row("updates", (one.updates, many.updates)),
        row("time per update", (one.seconds_per_update, many.seconds_per_update), "seconds"),
        row("time per 1000 samples", (_per_thousand(one), _per_thousand(many)), "seconds"),
        row("time of the run", (one.seconds, many.seconds), "seconds"),
        row("peak memory", (one.peak_memory_bytes, many.peak_memory_bytes), "bytes"),
    ]
    for name in _in_both(one.memory_bytes, many.memory_bytes):
        sizes = (one.memory_bytes[name], many.memory_bytes[name])
        rows.append(row(f"  of which {name}", sizes, "bytes"))
    rows += [
        row("collectives per update", (one.collectives_per_update, many.collectives_per_update)),
        row("collectives per 1000 samples", (_talks(one), _talks(many))),
    ]
    for name in _in_both(one.metrics, many.metrics):
        values = format_number(one.metrics[name]), format_number(many.metrics[name])
        rows.append((f"held-out {name}", *values, ""))
    return rows


def _in_both(one: Mapping[str, object], many: Mapping[str, object]) -> list[str]:
    return [name for name in one if name in many]


def _micro_batch(cell: SweptRun) -> int | None:
    sizes = [size for rank in cell.plan.get("micro_batches") or [] for size in rank]
    return max(sizes, default=None)


def _seconds_per_sample(figures: Summary) -> float | None:
    return 1 / figures.samples_per_second if figures.samples_per_second else None


def _per_thousand(figures: Summary) -> float | None:
    seconds = _seconds_per_sample(figures)
    return None if seconds is None else 1000 * seconds


def _talks(figures: Summary) -> float | None:
    """Collectives that 1000 samples cost."""
    if figures.collectives_per_update is None or not figures.samples:
        return None
    return 1000 * figures.collectives_per_update * figures.updates / figures.samples


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
