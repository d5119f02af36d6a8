"""Plans of a sweep's points as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from orchestrator.cli.start import with_notes
from orchestrator.clusters.api import Cluster, Request, class_for, class_of, cluster_of
from orchestrator.config.composer import Composer, points_of
from orchestrator.config.job_source import read_once
from orchestrator.config.schema import node_range
from orchestrator.errors import ClusterError, ConfigError
from orchestrator.plugins import CLUSTERS
from orchestrator.report.sweep_tables import only_varying
from orchestrator.report.terminal import literal, say
from orchestrator.sweep.cells import Action, Cell, cells_of, gpu_hours, refuse_beyond, seconds_of
from orchestrator.sweep.points import checked
from orchestrator.units import UNKNOWN, format_number, format_seconds, plural

STYLES = {
    Action.NOTHING: "green",
    Action.WAIT: "cyan",
    Action.RESUME: "yellow",
    Action.START: "yellow",
}


def cells_and_plans(composer: Composer) -> list[tuple[Cell, dict[str, Any]]]:
    """Return each point of a sweep as a cell, with its plan and notes.

    Raises:
        ConfigError: what is wrong with any of them, what a launch would refuse, or a search, whose
            points are not known before.
    """
    if composer.searches:
        raise ConfigError(
            "a search chooses its points by what came of earlier ones, so there is no plan of them"
        )
    points = checked(points_of(composer))
    cells = cells_of(points, force=any(point.config.sweep.force for point in points))
    refuse_beyond(cells)
    with read_once():
        return [(c, with_notes(c.point.plan, c.point.config)) for c in cells]


def cluster_answers(cells: Sequence[Cell]) -> list[str]:
    """Return the clusters' answers about all points that would be submitted, refusals included."""
    asked: dict[str, tuple[Cluster, Request]] = {}  # one for points that ask for the same
    kinds: dict[str, list[tuple[Cluster, Request]]] = {}
    for cell in cells:
        config = cell.point.config
        if cell.action not in (Action.START, Action.RESUME) or class_for(config).attended:
            continue
        key = repr(config.cluster)
        if key not in asked:
            cluster = cluster_of(config)
            asked[key] = cluster, cluster.request(cell.run.path, 0)
        kinds.setdefault(config.cluster.kind, []).append(asked[key])
    said: list[str] = []
    for kind, placed in kinds.items():
        try:
            with CLUSTERS.wrap_errors(kind, "to be asked about the points"):
                said += class_of(kind).predict_submit_all(placed)
        except ClusterError as error:
            said.append(f"the scheduler would say: {error}")
    return said


def row_of(cell: Cell) -> dict[str, Any]:
    """Return one row as values. `seconds`, `gpu_hours`: None where they are not known."""
    return {
        "folder": str(cell.run.path),
        "do": cell.action.value,
        "why": cell.why,
        "nodes": node_range(cell.point.config.cluster.nodes)[1],
        "seconds": seconds_of(cell.point),
        "gpu_hours": gpu_hours(cell.point),
    }


def print_cells(cells: Sequence[Cell], console: Console) -> None:
    """Print a row for each point, and the total cost of those that are to run."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("run", "point", "", "because", "nodes", "time at most", "GPU-hours"):
        right = heading in ("nodes", "time at most", "GPU-hours")
        table.add_column(heading, justify="right" if right else "left")
    varying = only_varying([cell.point.overrides for cell in cells])
    for cell, overrides in zip(cells, varying, strict=True):
        row = row_of(cell)
        words = " ".join(f"{k.rpartition('.')[2]}={v}" for k, v in overrides.items())
        todo = cell.action in (Action.START, Action.RESUME)
        table.add_row(
            literal(cell.run.path.name, console),
            literal(words, console),
            literal(cell.action.value, console, STYLES[cell.action]),
            literal(cell.why, console),
            str(row["nodes"]),
            format_seconds(row["seconds"]) if todo else "",
            _hours(row["gpu_hours"]) if todo else "",
        )
    console.print(table)
    left = [cell for cell in cells if cell.action in (Action.START, Action.RESUME)]
    hours = [gpu_hours(cell.point) for cell in left]
    known = sum(h for h in hours if h is not None) if None not in hours else None
    say(console, f"{plural(len(left), 'point')} of {len(cells)} to run, {_hours(known)} GPU-hours")


def _hours(value: float | None) -> str:
    return UNKNOWN if value is None else format_number(round(value, 3))
