"""The trials as people are shown them: a table in the sweep's folder, read without Optuna."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.report.tables.closing_table import describe_culprit
from orchestrator.run_folder.rundir import RunDir, write_json
from orchestrator.runs.status import statuses
from orchestrator.sweeps.search.asked import Asked
from orchestrator.sweeps.search.journal import SAME_AS, WHY, Journal
from orchestrator.sweeps.todo import Cell

STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}


def write_table(asked: Asked, journal: Journal, folders: Mapping[int, Path]) -> dict[str, Any]:
    """Write search.json anew, and give what it says.

    Args:
        folders: of trials that have one, by number.
    """
    trials: list[dict[str, Any]] = []
    for trial in journal.trials:
        same_as = trial.user_attrs.get(SAME_AS)
        folder = folders.get(trial.number if same_as is None else same_as)
        trials.append({
            "number": trial.number,
            "state": STATES.get(trial.state.name, "open"),
            "value": trial.value if trial.state.name == "COMPLETE" else None,
            "point": [axis.text(trial.params[axis.key]).lstrip("+") for axis in asked.space.axes],
            "folder": folder.name if folder is not None else None,
            "same_as": same_as,
            "why": trial.user_attrs.get(WHY),
        })  # fmt: skip
    line = asked.composer.line
    config_dir = line.config_dir and str(Path(line.config_dir).expanduser().absolute())
    table = {
        "search": asked.sweep.search,
        "objective": asked.sweep.objective,
        "maximize": asked.maximize,
        "wanted": asked.trials,
        "trials": trials,
        "best": _best(trials, maximize=asked.maximize),
        "line": {
            "overrides": list(line.overrides), "config_dir": config_dir,
            "config_name": line.config_name, "folder": os.getcwd(),  # noqa: PTH109  # as text
        },
    }  # fmt: skip
    write_json(RunDir(asked.folder).search, table)
    return table


def _best(trials: list[dict[str, Any]], *, maximize: bool) -> int | None:
    """The number of the best; of equal ones the first."""
    known = [trial for trial in trials if trial["value"] is not None]
    if not known:
        return None
    sign = -1 if maximize else 1
    return min(known, key=lambda trial: (sign * trial["value"], trial["number"]))["number"]


def why_no_value(cell: Cell) -> str:
    """Of a run that is over; "" where it has finished."""
    [status], _ = statuses([cell.run])
    if status.state == "finished":
        return ""
    culprit = (cell.run.read_result() or {}).get("culprit") if status.state == "failed" else None
    return describe_culprit(culprit) if culprit else status.reason or f"it was {status.state}"
