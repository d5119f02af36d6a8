"""Plans of a sweep's points as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from orchestrator.cli.start import with_notes
from orchestrator.clusters.api import Cluster, Request, class_for, class_of, cluster_of
from orchestrator.config.composer import Composer
from orchestrator.config.job_source import read_once
from orchestrator.config.schema import node_range
from orchestrator.errors import ClusterError, ConfigError
from orchestrator.plugins import CLUSTERS
from orchestrator.report.sweep_tables import only_varying
from orchestrator.report.terminal import literal, new_table, say
from orchestrator.sweep.cells import Action, Cell, cells_of
from orchestrator.sweep.points import checked
from orchestrator.units import plural

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
    points = checked(composer.all_points())
    cells = cells_of(points, force=any(point.config.sweep.force for point in points))
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
    """Return one row as values."""
    return {
        "folder": str(cell.run.path),
        "do": cell.action.value,
        "why": cell.why,
        "nodes": node_range(cell.point.config.cluster.nodes)[1],
    }


def print_cells(cells: Sequence[Cell], console: Console) -> None:
    """Print a row for each point, and how many are to run."""
    table = new_table(("run", "point", "", "because", "nodes"), right=(4,))
    varying = only_varying([cell.point.overrides for cell in cells])
    for cell, overrides in zip(cells, varying, strict=True):
        words = " ".join(f"{k.rpartition('.')[2]}={v}" for k, v in overrides.items())
        table.add_row(
            literal(cell.run.path.name, console),
            literal(words, console),
            literal(cell.action.value, console, STYLES[cell.action]),
            literal(cell.why, console),
            str(row_of(cell)["nodes"]),
        )
    console.print(table)
    left = sum(cell.action in (Action.START, Action.RESUME) for cell in cells)
    say(console, f"{plural(left, 'point')} of {len(cells)} to run")
