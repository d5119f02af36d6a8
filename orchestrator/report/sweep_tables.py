"""Tables of a sweep: its points side by side, time and memory, remarks on differences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.config.command_line import LENGTHS, key_of
from orchestrator.errors import UsageError
from orchestrator.report.status_tables import STATE_STYLES
from orchestrator.report.terminal import legible, literal, new_table, say
from orchestrator.rundir.checkpoints import list_checkpoints, weights_of
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import Figures, Record, Summary, read_metrics, summarize
from orchestrator.rundir.outcome import describe_end
from orchestrator.units import (
    UNKNOWN,
    format_bytes,
    format_count,
    format_number,
    format_ratio,
    format_seconds,
    plural,
    short_key,
    short_number,
)

STATE = "state"


@dataclass(frozen=True, kw_only=True)
class SweptRun:
    """One point of a sweep as it lies on disk: its figures, none of its records.

    `overrides` are those that vary in the sweep, key to value; `result` is None when the point
    wrote none; `spans` are the begin and end of each attempt's updates; `plan` is without the
    ranks' own parts; `weights` is the file of its final weights, None when it has none.
    """

    overrides: Mapping[str, Any]
    folder: Path
    result: Mapping[str, Any] | None = None
    summary: Summary = field(default_factory=lambda: summarize(None, Figures()))
    spans: Sequence[tuple[float, float]] = ()
    plan: Mapping[str, Any] = field(default_factory=dict[str, Any])
    weights: Path | None = None

    @property
    def finished(self) -> bool:
        """True if it ran to its end; only such points are compared."""
        return self.summary.state == "finished"


def describe_outcome(run: RunDir) -> str:
    """Return how a point ended and what it measured, in short."""
    result = run.read_result() or {}
    if why := describe_end(result):
        return why.partition("\n")[0]
    figures = summarize(result, Figures())
    # A program need not record its updates.
    is_counted = figures.updates or not run.read_plan().get("program")
    return ", ".join(
        [
            f"{figures.state}",
            *([plural(figures.updates, "update")] if is_counted else []),
            *([] if figures.loss is None else [f"loss {format_number(figures.loss)}"]),
            *([] if figures.seconds is None else [format_seconds(figures.seconds)]),
        ]
    )


def print_sweep(points: Sequence[SweptRun], console: Console, not_begun: int = 0) -> None:
    """Print the table, then one line for each point that did not finish.

    Columns that do not fit side by side go to further tables.

    Args:
        not_begun: how many points the sweep has besides these.
    """
    if not points:
        say(console, f"none of {plural(not_begun, 'point')} has begun")
        return
    first, *others = _columns(points, console)
    shown = [first]
    for column in others:
        if len(shown) > 1 and _width([*shown, column]) > console.width:
            console.print(_point_table(shown, console.width))
            shown = [first]
        shown.append(column)
    console.print(_point_table(shown, console.width))
    for name, point in zip(names(points), points, strict=True):
        if not point.finished:
            state = f"{point.summary.state}, see {point.folder}"
            why = describe_end(point.result or {}) or state
            first = why.partition("\n")[0]
            typed = " ".join(f"{key}={value}" for key, value in point.overrides.items())
            say(console, f"point {name} ({typed or '(no override)'}): {first}", "red")
    done = sum(point.finished for point in points)
    count = len(points) + not_begun
    style = "green" if done == count else "bold red"
    rest = f"; {not_begun} not begun yet: type the same line again" if not_begun else ""
    say(console, f"{done} of {plural(count, 'point')} finished{rest}", style)


def names(points: Sequence[SweptRun]) -> list[str]:
    """Return the name of each point: its folder's, as in `logs SWEEP/POINT`."""
    labels = [point.folder.name for point in points]
    return labels if len({*labels}) == len(labels) else [str(point.folder) for point in points]


def differences(points: Sequence[SweptRun]) -> list[str]:
    """Return the largest relative difference of each point's weights from the first finished one's.

    As text: `reference`, `-` for points without weights, `other shapes` for another model.
    """
    from orchestrator.report.compare import compare  # NumPy, which submitting must not wait for

    reference: Path | None = None
    texts: list[str] = []
    for point in points:
        if not point.finished or point.weights is None or not point.weights.is_file():
            texts.append("-")
        elif reference is None:
            reference = point.weights
            texts.append("reference")
        else:
            try:
                comparison = compare(point.weights, reference)
            except UsageError:
                texts.append("other shapes")
            else:
                difference = f"{comparison.max_relative_difference:.1e}"
                texts.append("same bits" if comparison.equal_bits else difference)
    return texts


Column = tuple[str, list[Text]]


def _columns(points: Sequence[SweptRun], console: Console) -> list[Column]:
    """Return the columns that hold something, the points' names first."""
    figures = [point.summary for point in points]
    columns: list[Column] = []

    def add(title: str, values: Iterable[str]) -> None:
        texts = [literal("-" if v == UNKNOWN else v, console) for v in values]
        if any(text.plain != "-" for text in texts):
            columns.append((legible(title, console), texts))

    def add_costs(title: str, field: str, form: Callable[[Any], str]) -> None:
        add(title, (form(getattr(f, field)) for f in figures))

    add("run", names(points))
    keys = list(dict.fromkeys(key for point in points for key in point.overrides))
    for key in keys:
        add(short_key(key, keys), (short_number(str(c.overrides.get(key, ""))) for c in points))
    add(STATE, (f.state for f in figures))
    for text in columns[-1][1]:
        text.style = STATE_STYLES.get(text.plain, "bold red")
    add_costs("time", "seconds", format_seconds)
    add_costs("per update", "seconds_per_update", format_seconds)
    add_costs("peak memory", "peak_memory_bytes", format_bytes)
    metrics = dict.fromkeys(name for f in figures for name in f.metrics)
    for name in metrics:
        values = (format_number(f.metrics[name]) if name in f.metrics else "-" for f in figures)
        add(f"held_out {name}", values)
    if not metrics:
        add("final loss", (format_number(f.loss) for f in figures))
    if samples := _compared_samples(points):
        add("samples", (format_count(f.samples) for f in figures))
        losses = (loss_at(point, samples) for point in points)
        add(f"loss at {format_count(samples)} samples", map(format_number, losses))
    add_costs("collectives /update", "collectives_per_update", format_count)
    add_costs("bytes /update", "bytes_on_wire_per_update", format_bytes)
    add("weights differ by", differences(points))
    return columns


def _compared_samples(points: Sequence[SweptRun]) -> int | None:
    """Return the samples after which losses are compared: those that all finished points were to
    have (`train.samples`), or the fewest that one had; None where all had equally many.
    """
    done = [point for point in points if point.finished and point.summary.samples]
    planned = {point.plan.get("samples") for point in done}
    if len(planned) == 1 and (samples := planned.pop()):
        return samples
    counts = {point.summary.samples or 0 for point in done}
    return min(counts) if len(counts) > 1 else None


AVERAGED = 0.1
"""Share of the samples whose losses are averaged: those of single updates vary with the batch."""


def loss_at(point: SweptRun, samples: int) -> float | None:
    """Return the mean training loss of the last tenth of so many samples; None if the point has not
    had them, or has not recorded them.
    """
    before, total, weight = 0, 0.0, 0
    for record in read_metrics(RunDir(point.folder).metrics).updates:
        size, loss = record.get("samples"), record.get("loss")
        if size is None or loss is None:
            return None
        before += size
        if before > (1 - AVERAGED) * samples:
            total, weight = total + size * loss, weight + size
        if before >= samples:
            return total / weight
    return None


def _width(columns: Sequence[Column], *, broken: bool = True) -> int:
    """Return the cells that a table needs: titles may be broken at spaces, values may not."""
    cells = (
        [*(title.split() if broken else [title]), *(text.plain for text in texts)]
        for title, texts in columns
    )
    return sum(max(map(cell_len, column)) for column in cells) + 2 * (len(columns) - 1)


def _point_table(columns: Sequence[Column], width: int) -> Table:
    titles = [title for title, _ in columns]
    if _width(columns, broken=False) > width:  # rich would fold words and values as well
        titles = [title.replace(" ", "\n") for title in titles]
    right = [index for index, title in enumerate(titles) if title != STATE]
    table = new_table(map(Text, titles), right)
    for row in zip(*(texts for _, texts in columns), strict=True):
        table.add_row(*row)
    return table


# ruff: noqa: RUF002 - the multiplication sign is what is printed.


SAME_WITHIN = 0.03
BATCH_KEYS = {f"accumulation.{name}" for name in ("global_batch", "steps", "micro_batch")}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two runs that are alike but for K: `fewer` has fewer micro-steps, `more` has more.

    `title` says what was kept equal, for example `equal micro-batch`. Plans of the points give
    `micro_steps`, `global_batch` and `micro_batches`.
    """

    title: str
    fewer: SweptRun
    more: SweptRun


def verdict(pair: Pair) -> str:
    """Compare time of an update and of a sample, and memory, in one sentence."""
    fewer, more = pair.fewer.summary, pair.more.summary
    per_update = _ratio(more.seconds_per_update, fewer.seconds_per_update)
    per_sample = _ratio(*map(_seconds_per_thousand, (pair.more, pair.fewer)))
    memory = _ratio(more.peak_memory_bytes, fewer.peak_memory_bytes)
    return (
        f"At {pair.title}, K={pair.more.plan['micro_steps']} against "
        f"K={pair.fewer.plan['micro_steps']}: "
        f"{_change('time per update', per_update)}, {_change('time per sample', per_sample)}, "
        f"{_change('peak memory', memory)}."
    )


def _change(what: str, ratio: float | None) -> str:
    """Return up, down or about the same, with the figure that says so.

    >>> _change("peak memory", 0.4), _change("time", 1.01), _change("time", None)
    ('peak memory down (0.40×)', 'time about the same (1.01×)', 'time unknown')
    """
    if ratio is None:
        return f"{what} unknown"
    if abs(ratio - 1) <= SAME_WITHIN:
        return f"{what} about the same ({format_ratio(ratio)})"
    return f"{what} {'up' if ratio > 1 else 'down'} ({format_ratio(ratio)})"


def _seconds_per_thousand(point: SweptRun) -> float | None:
    rate = point.summary.samples_per_second
    return 1000 / rate if rate else None


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def swept_run(
    run: RunDir,
    overrides: Mapping[str, str],
    *,
    result: Mapping[str, Any] | None = None,
    updates: Iterable[Record] | None = None,
) -> SweptRun:
    """Read a run folder as a point.

    Args:
        overrides: those that vary in the sweep, key to value.
        result: in place of the run's own, where it could not start.
        updates: that count, where they are read already.
    """
    saved = list_checkpoints(run.checkpoints) if run.checkpoints.is_dir() else []
    figures = Figures(read_metrics(run.metrics).updates if updates is None else updates)
    result = result or run.read_result()
    plan = run.read_plan()
    if plan.get("micro_batches"):  # of each rank, of which the first is compared
        plan["micro_batches"] = plan["micro_batches"][:1]
    return SweptRun(
        overrides=overrides,
        folder=run.path,
        result=result,
        summary=summarize(result, figures),
        spans=[*figures.spans.values()],
        plan=plan,
        weights=weights_of(saved[-1]) if saved else None,
    )


def current_overrides(run: RunDir, recorded: Sequence[str], more: Sequence[str] = ()) -> list[str]:
    """Return a run's overrides with those of its resumes, and `more`, in place of what they
    changed.
    """
    overrides = {key_of(override): override for override in recorded}
    resumes = (entry.get("overrides") or () for entry in run.read_resumes())
    for override in (*chain.from_iterable(resumes), *more):
        key = key_of(override)
        for replaced in LENGTHS if key in LENGTHS else (key,):
            overrides.pop(replaced, None)
        overrides[key] = override
    return [*overrides.values()]


def only_varying(all_overrides: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """Return of each point the overrides whose value is not the same in all points (all of them, if
    there is one point).

    >>> only_varying([["+a=1", "b=1"], ["+a=2", "b=1"]])
    [{'a': '1'}, {'a': '2'}]
    """
    tables = [dict(o.split("=", 1) for o in overrides if "=" in o) for overrides in all_overrides]
    keys = {key for table in tables for key in table}
    vary = {k for k in keys if len(tables) == 1 or len({table.get(k) for table in tables}) > 1}
    return [{k.lstrip("+"): v for k, v in table.items() if k in vary} for table in tables]


def accumulation_pairs(points: Sequence[SweptRun]) -> list[Pair]:
    """Return points that show what accumulation does: K = 1 and the largest K, all else being
    equal.

    One pair at equal micro-batch and one at equal global batch, where the sweep has them.
    """
    done = [c for c in points if c.finished and c.plan.get("micro_steps")]
    plain = [c for c in done if c.plan["micro_steps"] == 1]
    many = sorted(
        (c for c in done if c.plan["micro_steps"] > 1), key=lambda c: -c.plan["micro_steps"]
    )
    pairs: list[Pair] = []
    for title, figure in (
        ("equal micro-batch", lambda c: c.plan["micro_batches"][0][0]),
        ("equal global batch", lambda c: c.plan["global_batch"]),
    ):
        candidates = [
            (single, other) for other in many for single in plain if _alike(single, other, figure)
        ]
        pairs += (
            [Pair(title=title, fewer=candidates[0][0], more=candidates[0][1])] if candidates else []
        )
    return pairs


def _alike(first: SweptRun, other: SweptRun, figure: Callable[[SweptRun], int]) -> bool:
    """Return True if two points have the same figure and differ in their batches only."""
    keys = {*first.overrides, *other.overrides}  # points of different lines state different keys
    differing = {key for key in keys if first.overrides.get(key) != other.overrides.get(key)}
    return (
        differing <= BATCH_KEYS
        and first.plan["ranks"] == other.plan["ranks"]
        and figure(first) == figure(other)
    )


def timed_concurrently(points: Sequence[SweptRun]) -> str | None:
    """Return a sentence if points were timed while others computed on the same machine."""
    spans: list[tuple[float, float]] = []
    for point in points:
        if point.spans and RunDir(point.folder).read_submission().get("attended"):
            spans += point.spans
    if not any(after[0] < before[1] for before, after in pairwise(sorted(spans))):
        return None
    return (
        "Points were timed side by side on one machine, which makes their updates slower and less "
        "alike, and no comparison; sweep.parallel=1 times one after another."
    )
