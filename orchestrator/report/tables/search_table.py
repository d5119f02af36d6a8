"""A search's trials: what each chose and came to, the best first, from the file in its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from orchestrator.errors import RunFolderError
from orchestrator.report.terminal import literal, say
from orchestrator.rundir.files import read_json
from orchestrator.rundir.folder import RunDir
from orchestrator.units import UNKNOWN, format_number, plural, short_number

STYLES = {"complete": "green", "pruned": "yellow", "failed": "bold red", "open": "cyan"}
FIRST = 20  # of the trials with a value; the others are in search.json


def search_of(folder: Path) -> dict[str, Any] | None:
    """What a search wrote down for people in its folder; None where the folder is of none.

    Raises:
        RunFolderError: it is damaged.
    """
    path = RunDir(folder).search
    found = read_json(path)
    if found is None:
        return None
    numbers = [trial["number"] for trial in found["trials"]]
    words = [word for trial in found["trials"] for word in trial["point"]]
    if numbers != [*range(len(numbers))] or found["best"] not in (None, *numbers):
        raise RunFolderError(f"{path} is damaged: its trials are not numbered as a search does it")
    if not all("=" in word for word in words):
        raise RunFolderError(f"{path} is damaged: what a trial has chosen is no key with a value")
    return found


def words_of(search: Mapping[str, Any], number: int) -> str:
    """One sentence about a trial that has ended."""
    trial = search["trials"][number]
    words = f"trial {number}: "
    if trial["value"] is not None:
        words += f"{search['objective']} {format_number(trial['value'])}"
    else:
        words += f"{trial['state']} ({trial['why']})" if trial["why"] else trial["state"]
    best = search["best"]
    if best is None:
        return words
    if best == number:
        return f"{words}, the best so far"
    return f"{words}; the best so far is trial {best}: {_value(search['trials'][best])}"


def print_search(search: Mapping[str, Any], console: Console) -> None:
    """Print the trials, those with the best values first, and the best one's overrides."""
    trials = sorted(search["trials"], key=lambda trial: _order(trial, search["maximize"]))
    valued = [trial for trial in trials if trial["value"] is not None]
    shown = [*valued[:FIRST], *trials[len(valued) :]]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("trial", justify="right")
    table.add_column("state")
    table.add_column(literal(search["objective"], console), justify="right")
    table.add_column("chosen", overflow="fold")
    for trial in shown:
        best = trial["number"] == search["best"]
        table.add_row(
            str(trial["number"]),
            literal(trial["state"], console, STYLES[trial["state"]]),
            _value(trial),
            literal(" ".join(map(_short, trial["point"])) + _remark(trial), console),
            style="bold" if best else None,
        )
    console.print(table)
    if len(shown) < len(trials):
        say(console, f"{len(trials) - len(shown)} more with a value are in search.json", "dim")
    for sentence in told_in_words(search):
        say(console, sentence, "bold")


def with_trials(
    rows: Sequence[Mapping[str, Any]], search: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Runs of a search as values, each with the `trials` that it answers: number, state, value,
    parameters. One that was drawn again has the first's run; one that could not be a run is a row
    of its own, which has no folder.
    """
    of_run: dict[str | None, list[dict[str, Any]]] = {}
    for trial in search["trials"]:
        told = {key: trial[key] for key in ("number", "state", "value", "same_as", "why")}
        told["parameters"] = dict(word.split("=", 1) for word in trial["point"])
        of_run.setdefault(trial["folder"], []).append(told)
    runs = [{**row, "trials": of_run.get(PurePath(row["folder"]).name, [])} for row in rows]
    return runs + [
        {"folder": None, "state": trial["state"], "trials": [trial]}
        for trial in of_run.get(None, [])
    ]


def told_in_words(search: Mapping[str, Any]) -> list[str]:
    """How many trials came to what, and which is the best, as sentences."""
    found = [_counted(search)]
    if search["best"] is not None:
        best = search["trials"][search["best"]]
        value = f"{search['objective']} {_value(best)}"
        found.append(f"the best is trial {best['number']}: {value}, {' '.join(best['point'])}")
    return found


def _counted(search: Mapping[str, Any]) -> str:
    states = [trial["state"] for trial in search["trials"]]
    counts = [
        f"{states.count(state)} {words}"
        for state, words in (
            ("complete", "with a value"),
            ("pruned", "pruned"),
            ("failed", "failed"),
            ("open", "not over"),
        )
        if state in states
    ]
    of = f"{len(states)} of {plural(search['wanted'], 'trial')}"
    return f"{of}: {', '.join(counts)}" if counts else of


def _order(trial: Mapping[str, Any], maximize: bool) -> tuple[bool, float, int]:
    value = trial["value"]
    known = 0.0 if value is None else -value if maximize else value
    return value is None, known, trial["number"]


def _value(trial: Mapping[str, Any]) -> str:
    return UNKNOWN if trial["value"] is None else format_number(trial["value"])


def _short(override: str) -> str:
    """An override as its key's last part and a value that can be read.

    >>> _short("optimizer.lr=0.012345678901")
    'lr=0.0123457'
    """
    key, _, value = override.partition("=")
    return f"{key.rpartition('.')[2]}={short_number(value)}"


def _remark(trial: Mapping[str, Any]) -> str:
    if trial["same_as"] is not None:
        return f" (the same as trial {trial['same_as']})"
    return f" ({trial['why']})" if trial["why"] else ""
