"""Tables of `status`: many runs, one run, the trials of a search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.text import Text

from orchestrator.report.terminal import command, literal, new_table, print_facts, say
from orchestrator.rundir.status import UNREADABLE, RunStatus
from orchestrator.units import (
    UNKNOWN,
    format_count,
    format_learning_rate,
    format_number,
    format_rate,
    format_seconds,
    plural,
    short_overrides,
)

# ruff: noqa: RUF001 - the signs are meant, and have stand-ins where they cannot be shown.


STATE_STYLES = {
    "finished": "green",
    "running": "bold green",
    "starting": "cyan",
    "ending": "cyan",
    "pending": "yellow",
    "stopped": "yellow",
    "pruned": "yellow",
    "cancelled": "yellow",
    "failed": "bold red",
    "lost": "bold red",
    "unknown": "red",
    "private": "dim",
    "damaged": "bold red",
}
URGENT = ("failed", "lost", "damaged")
HEADINGS = (
    "run",
    "state",
    "job",
    "nodes",
    "updates",
    "samples/s",
    "last boundary",
    "restarts",
    "time left",
)
ALWAYS = ("run", "state", "updates")
RIGHT = ("updates", "samples/s", "restarts")
NONE = "–"
MOST_WIDE = 10_000


def short_name(folder: Path, here: Path) -> str:
    """Return a folder as seen from here.

    >>> short_name(Path("/a/runs/x"), Path("/a")), short_name(Path("/b/x"), Path("/a"))
    ('runs/x', '/b/x')
    """
    return str(folder.relative_to(here)) if folder.is_relative_to(here) else str(folder)


def updates_done(run: RunStatus) -> str:
    """Return the updates done, of how many if that is known; a program need not say."""
    if run.program and not run.updates:
        return NONE
    of = f"/{format_count(run.total)}" if run.total is not None else ""
    return f"{format_count(run.updates)}{of}"


def _cells(run: RunStatus, here: Path) -> list[str]:
    name = short_name(run.folder, here)
    if run.state in UNREADABLE:
        return [name, run.state, *[NONE] * (len(HEADINGS) - 2)]
    rate, age, time_left = run.samples_per_second, run.boundary_age_s, run.time_left_s
    return [
        name,
        run.state,
        run.job_id or NONE,
        run.nodes or NONE,
        updates_done(run),
        f"{rate:,.0f}" if rate is not None else NONE,
        f"{format_seconds(age)} ago" if age is not None else NONE,
        format_count(run.restarts) if run.restarts else NONE,
        format_seconds(time_left) if time_left is not None else NONE,
    ]


def _is_numeric(values: Sequence[Any]) -> bool:
    return all(value is None or isinstance(value, int | float) for value in values)


def _shown(value: Any) -> str:
    if value is None or value == []:
        return NONE
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return format_count(value) if isinstance(value, int) else format_number(value)


def remark(run: RunStatus) -> str | None:
    """Return what does not fit a column: the reason of its state, or of its latest restart."""
    if run.reason:
        reason = run.reason.replace(f"{run.folder}/", "").replace(str(run.folder), "it")
        return f"{run.culprit}: {reason}" if run.culprit else reason
    if run.survived:
        lost = f"ranks were lost {plural(run.survived, 'time')}, and the others went on"
        return f"{lost}; {plural(run.rejoined, 'rank')} rejoined" if run.rejoined else lost
    if run.restarts and run.why:
        lost = f", {plural(run.lost_updates, 'update')} done again" if run.lost_updates else ""
        return f"last restart: {run.why}{lost}"
    return None


def print_status(
    runs: Sequence[RunStatus],
    console: Console,
    here: Path,
    columns: Mapping[str, Sequence[Any]] | None = None,
) -> None:
    """Print the states of runs. Names stay whole, however narrow the terminal.

    Args:
        columns: a value for each run, by heading; in place of those that are chosen here.
    """
    rows = [_cells(run, here) for run in runs]
    headings = [*HEADINGS, *(columns or ())]
    for index, row in enumerate(rows):
        row += [_shown(column[index]) for column in (columns or {}).values()]
    if columns is None:
        shown_columns = [
            index
            for index, heading in enumerate(HEADINGS)
            if heading in ALWAYS or any(row[index] != NONE for row in rows)
        ]
    else:
        shown_columns = [0, 1, *range(len(HEADINGS), len(headings))]
    numeric = {name for name, values in (columns or {}).items() if _is_numeric(values)}
    right = [
        column
        for column, index in enumerate(shown_columns)
        if headings[index] in RIGHT or headings[index] in numeric
    ]
    table = new_table([headings[index] for index in shown_columns], right)
    for run, row in zip(runs, rows, strict=True):
        texts = [literal(row[index], console) for index in shown_columns]
        texts[1].style = STATE_STYLES.get(run.state, "")
        table.add_row(*texts)
    unlimited = console.options.update(max_width=MOST_WIDE)
    while (width := Measurement.get(console, unlimited, table).maximum) > console.width:
        optional = [column for column in table.columns if column.header not in ALWAYS]
        optional = [] if columns is not None else optional  # they were asked for
        if not (console.is_terminal and optional):
            break
        table.columns.remove(optional[-1])
    table.width = width  # also if it is wider than the terminal
    console.print(table, soft_wrap=True)
    remarks: list[Text] = []
    for run in runs:
        if text := remark(run):
            text = text.partition("\n")[0]  # `status RUN` has all of it
            style = STATE_STYLES.get(run.state, "") if run.state in URGENT else "dim"
            remarks.append(literal(f"{short_name(run.folder, here)}: {text}", console, style))
    if remarks:
        whole = not console.is_terminal  # prose, as `say` breaks it
        console.print(*remarks, sep="\n", soft_wrap=whole, highlight=False)


WARNINGS_SHOWN = 5


def print_run(run: RunStatus, console: Console) -> None:
    """Print one run."""
    print_facts(_rows(run), console)
    more = len(run.warnings) - WARNINGS_SHOWN
    if more > 0:
        say(console, f"{plural(more, 'earlier warning')}: in metrics.jsonl", "dim", prose=True)
    for sentence in run.warnings[-WARNINGS_SHOWN:]:
        say(console, f"warning: {sentence}", "yellow", prose=True)
    say(console, f"run folder: {run.folder}")
    if run.state in ("stopped", "lost", "failed", "cancelled"):
        say(console, f"to go on from here: {command('resume', run.folder)}", "bold")


def _rows(run: RunStatus) -> list[tuple[str, str, str]]:
    style = STATE_STYLES.get(run.state, "")
    where = [f"job {run.job_id}"] if run.job_id else []
    where += [f"on {run.nodes}"] if run.nodes else []
    rows = [("state", " ".join([run.state, *where]), style)]
    if text := remark(run):
        rows.append(("", text, style if run.reason else "dim"))
    if run.state in UNREADABLE:
        return rows
    if run.program:
        rows.append(("program", run.program, ""))
    rows.append(("updates", updates_done(run), ""))
    if run.loss is not None:
        rows.append(("loss", format_number(run.loss), "bold"))
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


TRIAL_STYLES = {"complete": "green", "pruned": "yellow", "failed": "bold red", "open": "cyan"}


def describe_trial(search: Mapping[str, Any], number: int) -> str:
    """Return one sentence about a trial that has ended."""
    trial = search["trials"][number]
    text = f"trial {number}: "
    if trial["value"] is not None:
        text += f"{search['objective']} {format_number(trial['value'])}"
    else:
        text += f"{trial['state']} ({trial['why']})" if trial["why"] else trial["state"]
    best = search["best"]
    if best is None:
        return text
    if best == number:
        return f"{text}, the best so far"
    return f"{text}; the best so far is trial {best}: {_value(search['trials'][best])}"


def print_search(search: Mapping[str, Any], console: Console) -> None:
    """Print the trials, those with the best values first, and the best one's overrides."""
    sign = -1 if search["maximize"] else 1
    trials = sorted(search["trials"], key=lambda t: (t["value"] is None, sign * (t["value"] or 0)))
    headings = ("trial", "state", literal(search["objective"], console), "chosen")
    table = new_table(headings, right=(0, 2))
    for trial in trials:
        best = trial["number"] == search["best"]
        why = f" ({trial['why']})" if trial["why"] else ""
        table.add_row(
            str(trial["number"]),
            literal(trial["state"], console, TRIAL_STYLES[trial["state"]]),
            _value(trial),
            literal(short_overrides(_chosen(trial)) + why, console),
            style="bold" if best else None,
        )
    console.print(table)
    for sentence in describe_search(search):
        say(console, sentence, "bold")


def with_trials(
    rows: Sequence[Mapping[str, Any]], search: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Add to each run of a search the trial that it answers: number, state, value, parameters. A
    trial that was not started is a row of its own, without a folder.
    """
    of_run: dict[str | None, list[dict[str, Any]]] = {}
    for trial in search["trials"]:
        shown = {key: trial[key] for key in ("number", "state", "value", "why")}
        shown["parameters"] = _chosen(trial)
        of_run.setdefault(trial["folder"], []).append(shown)
    runs = [{**row, "trials": of_run.get(PurePath(row["folder"]).name, [])} for row in rows]
    return runs + [
        {"folder": None, "state": trial["state"], "trials": [trial]}
        for trial in of_run.get(None, [])
    ]


def describe_search(search: Mapping[str, Any]) -> list[str]:
    """Return the outcomes of all trials, and the best one, as sentences."""
    states = Counter(trial["state"] for trial in search["trials"])
    counts = ", ".join(f"{number} {state}" for state, number in states.most_common())
    of = f"{states.total()} of {plural(search['wanted'], 'trial')}"
    sentences = [f"{of}: {counts}" if counts else of]
    if search["best"] is not None:
        best = search["trials"][search["best"]]
        value = f"{search['objective']} {_value(best)}"
        sentences.append(f"the best is trial {best['number']}: {value}, {' '.join(best['point'])}")
    return sentences


def _chosen(trial: Mapping[str, Any]) -> dict[str, str]:
    return dict(item.split("=", 1) for item in trial["point"])


def _value(trial: Mapping[str, Any]) -> str:
    return UNKNOWN if trial["value"] is None else format_number(trial["value"])
