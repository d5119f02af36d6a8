"""The plan of a sweep: each point's, and what a launch would do with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from orchestrator.clusters.api import Cluster, Request, class_for, class_of, cluster_of
from orchestrator.config.composer import Composer
from orchestrator.config.schema import node_range
from orchestrator.errors import ClusterError, ConfigError
from orchestrator.plugins import CLUSTERS
from orchestrator.report.run_tables import print_plans
from orchestrator.report.sweep_tables import only_varying
from orchestrator.report.terminal import literal, new_table, say
from orchestrator.runs.planning import with_notes
from orchestrator.source.modules import read_once
from orchestrator.sweep.points import check_points
from orchestrator.sweep.tasks import Action, PointTask, tasks_of
from orchestrator.units import plural, short_overrides

STYLES = {
    Action.NOTHING: "green",
    Action.IN_PROGRESS: "cyan",
    Action.RESUME: "yellow",
    Action.START: "yellow",
}


MOST_PLANS = 8  # points whose differences are shown one by one, before the table of all


@dataclass(frozen=True, kw_only=True)
class PlannedPoints:
    """The effect that a launch of a sweep would have.

    Attributes:
        tasks, plans: of each point.
        sentences: what the cluster would say, and what would be refused.
    """

    tasks: Sequence[PointTask]
    plans: Sequence[dict[str, Any]]
    sentences: Sequence[str]

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {"overrides": list(task.point.overrides), "point": _row_of(task), **plan}
            for task, plan in zip(self.tasks, self.plans, strict=True)
        ]


def plan_points(composer: Composer) -> PlannedPoints:
    """Return each rank's work in each point of a sweep, as a launch would have it.

    Raises `UsageError` as a launch does; `ConfigError` for a search, whose points are not known.
    """
    if composer.search != "none":
        raise ConfigError(
            "a search chooses its points by what came of earlier ones, so there is no plan of them"
        )
    points = check_points(composer)
    tasks = tasks_of(points, force=any(point.config.sweep.force for point in points))
    with read_once():
        plans = [with_notes(point.plan, point.config) for point in points]
    sentences = _cluster_answers(tasks)
    if any(task.replaces for task in tasks):
        sentences.append("changed points with results or checkpoints run again only with --changed")
    return PlannedPoints(tasks=tasks, plans=plans, sentences=sentences)


def show_planned_points(planned: PlannedPoints, console: Console) -> None:
    """Print the plans of a sweep's points as tables, and the next step for each."""
    varying = only_varying([task.point.overrides for task in planned.tasks])
    labels = [task.point.label(o) for task, o in zip(planned.tasks, varying, strict=True)]
    print_plans(dict(zip(labels, planned.plans, strict=True)), console, most_shown=MOST_PLANS)
    _print_tasks(planned.tasks, console)
    for sentence in planned.sentences:
        say(console, sentence, "yellow", prose=True)


def _cluster_answers(tasks: Sequence[PointTask]) -> list[str]:
    """Return the clusters' answers about all points that would be submitted, refusals included."""
    requests: dict[str, tuple[Cluster, Request]] = {}  # one for points that ask for the same
    kinds: dict[str, list[tuple[Cluster, Request]]] = {}
    for task in tasks:
        config = task.point.config
        if task.action not in (Action.START, Action.RESUME) or class_for(config).attended:
            continue
        key = repr(config.cluster)
        if key not in requests:
            cluster = cluster_of(config)
            requests[key] = cluster, cluster.request(task.run.path, 0)
        kinds.setdefault(config.cluster.kind, []).append(requests[key])
    answers: list[str] = []
    for kind, placed in kinds.items():
        try:
            with CLUSTERS.wrap_errors(kind, "to be asked about the points"):
                answers += class_of(kind).predict_submit_all(placed)
        except ClusterError as error:
            answers.append(f"the scheduler would say: {error}")
    return answers


def _row_of(task: PointTask) -> dict[str, Any]:
    return {
        "folder": str(task.run.path),
        "action": task.action.value,
        "why": task.why,
        "nodes": node_range(task.point.config.cluster.nodes)[1],
    }


def _print_tasks(tasks: Sequence[PointTask], console: Console) -> None:
    """Print a row for each point, and how many are to run."""
    table = new_table(("run", "point", "", "because", "nodes"), right=(4,))
    varying = only_varying([task.point.overrides for task in tasks])
    for task, overrides in zip(tasks, varying, strict=True):
        table.add_row(
            literal(task.run.path.name, console),
            literal(short_overrides(overrides), console),
            literal(task.action.value, console, STYLES[task.action]),
            literal(task.why, console),
            str(_row_of(task)["nodes"]),
        )
    console.print(table)
    count = sum(task.action in (Action.START, Action.RESUME) for task in tasks)
    say(console, f"{plural(count, 'point')} of {len(tasks)} to run")
