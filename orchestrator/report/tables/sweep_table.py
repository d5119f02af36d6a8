"""One table for the points of a sweep: what was varied, what it cost, and what it changed.

A point that failed keeps its row and says why; the difference column compares each finished
point's final weights with those of the first finished one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.errors import UsageError
from orchestrator.report.tables.closing_table import STATE_STYLES
from orchestrator.report.terminal import legible, literal, say
from orchestrator.rundir.metrics import Record, Summary, summarize
from orchestrator.rundir.outcome import describe_culprit
from orchestrator.units import (
    UNKNOWN,
    format_bytes,
    format_count,
    format_number,
    format_seconds,
    plural,
    short_number,
)

INDENT = "   "


@dataclass(frozen=True, kw_only=True)
class SweptRun:
    """One point of a sweep as it lies on disk.

    `overrides` are those that vary in the sweep, key to value; `result` is None when the point
    wrote none; `weights` is the file of its final weights, None when it has none.
    """

    overrides: Mapping[str, Any]
    folder: Path
    result: Mapping[str, Any] | None = None
    updates: Sequence[Record] = ()
    plan: Mapping[str, Any] = field(default_factory=dict[str, Any])
    weights: Path | None = None

    @property
    def summary(self) -> Summary:
        """Its figures."""
        return summarize(self.result, self.updates)

    @property
    def finished(self) -> bool:
        """Whether it ran to its end; only such points are compared."""
        return self.summary.state == "finished"

    @property
    def title(self) -> str:
        """Its overrides as they were typed."""
        return (
            " ".join(f"{key}={value}" for key, value in self.overrides.items()) or "(no override)"
        )


def print_sweep(cells: Sequence[SweptRun], console: Console) -> None:
    """Print the table, then one line for each point that did not finish."""
    if not cells:
        say(console, "the sweep has no points")
        return
    columns = _columns(cells, console)
    if _width(columns) <= console.width:
        console.print(_table(columns, console))
    else:
        # Two tables that can be read beat one whose every value is folded.
        keys = [c for c in columns if c.group == "key"]
        parts = [[c for c in columns if c.group == group] for group in ("cost", "outcome")]
        if any(_width([*keys, *part]) > console.width for part in parts):
            # Nor are the points' names folded: they stand above, each by its folder.
            for name, cell in zip(names(cells), cells, strict=True):
                for line in broken(f"{name}: {cell.title}", console.width):
                    say(console, line)
            keys = keys[:1]
        for part in parts:
            console.print(_table([*keys, *part], console))
    for name, cell in zip(names(cells), cells, strict=True):
        if not cell.finished:
            _print_failure(name, cell, console)
    done = sum(cell.finished for cell in cells)
    style = "green" if done == len(cells) else "bold red"
    say(console, f"{done} of {plural(len(cells), 'point')} finished", style)


def names(cells: Sequence[SweptRun]) -> list[str]:
    """What a point is called wherever one speaks of it: its folder, as in `logs SWEEP/POINT`."""
    found = [cell.folder.name for cell in cells]
    return found if len({*found}) == len(found) else [str(cell.folder) for cell in cells]


def differences(cells: Sequence[SweptRun]) -> list[str]:
    """Largest relative difference of each point's weights from the first finished point's.

    As text, since there are points without one: `reference`, `-` for those that did not finish,
    `other shapes` where the model itself was varied.
    """
    reference: Path | None = None
    texts: list[str] = []
    for cell in cells:
        if not cell.finished or cell.weights is None:
            texts.append("-")
        elif reference is None:
            reference = cell.weights
            texts.append("reference")
        else:
            texts.append(_difference(cell.weights, reference))
    return texts


def _difference(weights: Path, reference: Path) -> str:
    if not weights.is_file() or not reference.is_file():
        return "-"
    try:
        from orchestrator.report.compare import compare  # NumPy, which submitting must not wait for

        comparison = compare(weights, reference)
    except UsageError:
        return "other shapes"
    if comparison.equal_bits:
        return "same bits"
    return f"{comparison.max_relative_difference:.1e}"


@dataclass(frozen=True)
class _Column:
    """A column as text. The group says which table it goes to when one is too wide."""

    group: str
    title: str
    values: list[Text]
    left: bool = False

    @property
    def width(self) -> int:
        """Cells it needs; titles may be broken at their spaces, values may not."""
        return max(cell_len(t) for t in [*self.title.split(), *(v.plain for v in self.values)])


def _columns(cells: Sequence[SweptRun], console: Console) -> list[_Column]:
    def column(group: str, title: str, values: Iterable[str], left: bool = False) -> _Column:
        texts = [literal("-" if v == UNKNOWN else v, console) for v in values]
        return _Column(group, legible(title, console), texts, left)

    figures = [cell.summary for cell in cells]
    keys = list(dict.fromkeys(key for cell in cells for key in cell.overrides))
    state = column("cost", "state", (f.state for f in figures), left=True)
    for text in state.values:
        text.style = STATE_STYLES.get(text.plain, "bold red")
    metrics = dict.fromkeys(name for f in figures for name in f.metrics)
    losses = [] if metrics else [(cell.result or {}).get("loss") for cell in cells]
    found = [
        column("key", "run", names(cells)),
        *(
            column("key", short_key(key, keys), _readable(c.overrides.get(key, "") for c in cells))
            for key in keys
        ),
        state,
        column("cost", "time", (format_seconds(f.seconds) for f in figures)),
        column("cost", "per update", (format_seconds(f.seconds_per_update) for f in figures)),
        column("cost", "peak memory", (format_bytes(f.peak_memory_bytes) for f in figures)),
        *(
            column(
                "outcome",
                name,
                (format_number(f.metrics[name]) if name in f.metrics else "-" for f in figures),
            )
            for name in metrics
        ),
        column("outcome", "final loss", map(format_number, losses or [None] * len(cells))),
        column(
            "outcome",
            "collectives /update",
            (format_count(f.collectives_per_update) for f in figures),
        ),
        column(
            "outcome",
            "bytes /update",
            (format_bytes(f.bytes_on_wire_per_update) for f in figures),
        ),
        column("outcome", "weights differ by", differences(cells)),
    ]
    return [c for c in found if c.group == "key" or any(v.plain != "-" for v in c.values)]


def broken(text: str, width: int) -> list[str]:
    """`text` in lines, broken after spaces and commas; inside a word only if it fills a line.

    >>> broken("1: accumulation={global_batch:32,steps:1}", 36)
    ['1: accumulation={global_batch:32,', '   steps:1}']
    >>> broken("1: a=2", 1)
    ['1:', '   a', '   =', '   2']
    """
    width = max(width, len(INDENT) + 1)  # room for a letter, however narrow the terminal
    lines = [""]
    for piece in re.findall(r"[^ ,]+[ ,]*|[ ,]+", text):
        rest = piece
        if len(lines[-1]) + len(rest.rstrip()) > width and lines[-1].strip():
            lines.append(INDENT)
        while len(lines[-1]) + len(rest.rstrip()) > width:
            room = max(1, width - len(lines[-1]))
            lines[-1], rest = lines[-1] + rest[:room], rest[room:]
            lines.append(INDENT)
        lines[-1] += rest
    return [line.rstrip() for line in lines]


def short_key(key: str, keys: Sequence[str]) -> str:
    """The last part of a key, when no other swept key ends in the same."""
    last = key.rsplit(".", 1)[-1]
    return last if [k.rsplit(".", 1)[-1] for k in keys].count(last) == 1 else key


def _readable(values: Iterable[Any]) -> list[str]:
    """Their texts, with fewer digits where all that differ differ still."""
    texts = [str(value) for value in values]
    short = {text: short_number(text) for text in texts}
    apart = len(set(short.values())) == len(short)
    return [short[text] for text in texts] if apart else texts


def _width(columns: Sequence[_Column]) -> int:
    return sum(column.width for column in columns) + 2 * (len(columns) - 1)


def _table(columns: Sequence[_Column], console: Console) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    fits = _width(columns) <= console.width
    for column in columns:
        table.add_column(
            Text(column.title),
            justify="left" if column.left else "right",
            width=column.width if fits or column.group != "key" else None,
            overflow="fold",
        )
    for row in zip(*(column.values for column in columns), strict=True):
        table.add_row(*row)
    return table


def _print_failure(name: str, cell: SweptRun, console: Console) -> None:
    culprit = (cell.result or {}).get("culprit")
    why = describe_culprit(culprit) if culprit else f"{cell.summary.state}, see {cell.folder}"
    say(console, f"point {name} ({cell.title}): {why}", "red")
