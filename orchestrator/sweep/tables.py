"""Plans and results of a sweep as tables, and remarks about their differences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from orchestrator.clusters.api import Cluster, Request, class_for, class_of, cluster_of
from orchestrator.config.composer import Composer, points_of
from orchestrator.config.job_source import read_once
from orchestrator.config.rules import at_once
from orchestrator.config.schema import node_range
from orchestrator.errors import ClusterError, ConfigError
from orchestrator.plugins import CLUSTERS
from orchestrator.report.tables.sweep_table import SweptRun, names
from orchestrator.report.tables.time_and_memory import Pair
from orchestrator.report.terminal import literal, say
from orchestrator.rundir.checkpoints import WEIGHTS, complete
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import read_metrics
from orchestrator.runs.foreseen import with_notes
from orchestrator.runs.resuming.rules import Kind, changes
from orchestrator.sweep.cells import Cell, Do, cells_of, gpu_hours, refuse_beyond, seconds_of
from orchestrator.sweep.points import checked
from orchestrator.units import UNKNOWN, format_number, format_seconds, plural


def swept_run(
    run: RunDir, overrides: Mapping[str, str], *, result: Mapping[str, Any] | None = None
) -> SweptRun:
    """A run folder as a point.

    Args:
        overrides: those that vary in the sweep, key to value.
        result: in place of the run's own, where it could not start.
    """
    saved = complete(run.checkpoints) if run.checkpoints.is_dir() else []
    return SweptRun(
        overrides=overrides,
        folder=run.path,
        result=result or run.read_result(),
        updates=read_metrics(run.metrics).updates if run.metrics.exists() else (),
        plan=run.read_plan(),
        weights=saved[-1] / WEIGHTS if saved else None,
    )


def only_varying(all_overrides: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """Of each point's overrides those whose value is not the same in all points (all of them, when
    there is one point).

    >>> only_varying([["+a=1", "b=1"], ["+a=2", "b=1"]])
    [{'a': '1'}, {'a': '2'}]
    """
    tables = [dict(o.split("=", 1) for o in overrides if "=" in o) for overrides in all_overrides]
    keys = {key for table in tables for key in table}
    vary = {k for k in keys if len(tables) == 1 or len({table.get(k) for table in tables}) > 1}
    return [{k.lstrip("+"): v for k, v in table.items() if k in vary} for table in tables]


def accumulation_pairs(cells: Sequence[SweptRun]) -> list[Pair]:
    """Points that show what accumulation does: K = 1 beside the largest K, all else being equal.

    One pair at equal micro-batch and one at equal global batch, where the sweep has them.
    """
    done = [c for c in cells if c.finished and c.plan.get("micro_steps")]
    plain = [c for c in done if c.plan["micro_steps"] == 1]
    many = sorted(
        (c for c in done if c.plan["micro_steps"] > 1), key=lambda c: -c.plan["micro_steps"]
    )
    pairs: list[Pair] = []
    for title, figure in (
        ("equal micro-batch", lambda c: c.plan["micro_batches"][0][0]),
        ("equal global batch", lambda c: c.plan["global_batch"]),
    ):
        found = [(one, other) for other in many for one in plain if _alike(one, other, figure)]
        pairs += [Pair(title=title, one=found[0][0], many=found[0][1])] if found else []
    return pairs


def _alike(one: SweptRun, other: SweptRun, figure: Callable[[SweptRun], int]) -> bool:
    """Whether two points have the same figure and differ in their accumulation only."""
    differing = {k for k, v in other.overrides.items() if one.overrides.get(k) != v}
    alike = all(key.split(".")[0] == "accumulation" for key in differing)
    return alike and one.plan["ranks"] == other.plan["ranks"] and figure(one) == figure(other)


def timed_beside(cells: Sequence[SweptRun]) -> str | None:
    """A sentence about points that were timed while others computed; None where there are none."""
    spans = sorted(
        (*span, name)
        for name, cell in zip(names(cells), cells, strict=True)
        if RunDir(cell.folder).read_submission().get("held")
        for span in _spans(cell)
    )
    found: set[str] = set()
    last_end, last = 0.0, ""
    for begin, end, name in spans:
        if begin < last_end and name != last:
            found |= {name, last}
        if end > last_end:
            last_end, last = end, name
    if not found:
        return None
    which = ", ".join(name for name in names(cells) if name in found)
    words = "All points" if len(found) == len(cells) else f"Points {which}"
    return (
        f"{words} were timed side by side with others on one machine, which makes their updates "
        f"slower and less alike, and no comparison; sweep.parallel=1 times one after another."
    )


def _spans(cell: SweptRun) -> Iterator[tuple[float, float]]:
    """From when to when it made updates, in seconds since 1970; for each attempt."""
    attempts: dict[int, list[tuple[float, float]]] = {}
    for update in cell.updates:
        if update.get("time") and update.get("update_s"):
            span = (update["time"] - update["update_s"], update["time"])
            attempts.setdefault(update.get("attempt", 0), []).append(span)
    for made in attempts.values():
        yield min(begin for begin, _ in made), max(end for _, end in made)


MAGNIFIES = (
    "Adam in float32 magnifies rounding where a gradient is nearly zero, so weights differ by more "
    "than the updates do; optimizer=sgd or train.precision=float64 shows the exactness."
)
OF_THE_PLAN = {
    "global_batch": "the global batch", "updates": "the number of updates",
    "schedule": "the learning rates",
}  # fmt: skip


def remarks(cells: Sequence[SweptRun]) -> list[str]:
    """What has to be known to read times, and the differences from the first finished point."""
    beside = timed_beside(cells)
    return [*([beside] if beside else []), *_of_weights(cells)]


def _of_weights(cells: Sequence[SweptRun]) -> list[str]:
    if any(cell.plan.get("program") for cell in cells):  # whose weights are their own
        return []
    finished = [(n, cell) for n, cell in zip(names(cells), cells, strict=True) if cell.finished]
    if len(finished) < 2:
        return []
    (_, first), *rest = finished
    digest = (first.result or {}).get("weights_sha256")
    others = [
        (name, cell)
        for name, cell in rest
        if digest is None or (cell.result or {}).get("weights_sha256") != digest
    ]
    reference = RunDir(first.folder).read_config()
    unlike: dict[str, list[str]] = {}
    for name, cell in others:
        causes = _causes(first, cell, reference, RunDir(cell.folder).read_config())
        if causes:
            unlike[name] = causes
    said: list[str] = []
    if unlike:
        causes = ", ".join(dict.fromkeys(cause for found in unlike.values() for cause in found))
        points = ", ".join(unlike)
        said.append(
            f"Weights of point{'s' * (len(unlike) > 1)} {points} differ from the first finished "
            f"point's because other updates were made ({causes}), not by rounding."
        )
    if len(unlike) < len(others) and _magnifies(reference):
        said.append(MAGNIFIES)
    return said


def _causes(
    one: SweptRun, other: SweptRun, before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[str]:
    """What makes two points compute something else; empty where only the split differs."""
    keys = [
        change.key
        for change in changes(before, after)
        if change.kind is Kind.NUMBERS and not change.key.startswith("run.")
    ]
    plans = [OF_THE_PLAN[n] for n in OF_THE_PLAN if one.plan.get(n) != other.plan.get(n)]
    return [*keys, *plans]


def _magnifies(config: Mapping[str, Any]) -> bool:
    """Whether rounding grows in this optimizer, so that weights differ more."""
    optimizer, train = config.get("optimizer", {}), config.get("train", {})
    return "adam" in str(optimizer).lower() and train.get("precision") != "float64"


STYLES = {Do.NOTHING: "green", Do.WAIT: "cyan", Do.GO_ON: "yellow", Do.BEGIN: "yellow"}


def cells_and_plans(composer: Composer) -> list[tuple[Cell, dict[str, Any]]]:
    """Each point of a sweep: what a launch would do with it, and its plan with notes.

    Raises:
        ConfigError: what is wrong with any of them, what a launch would refuse, or a search, whose
            points nobody knows before.
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


def foretold(cells: Sequence[Cell]) -> list[str]:
    """What places say of all points together that would be submitted, or why they refuse them: as
    sentences, for a plan is shown in either case.
    """
    asked: dict[str, tuple[Cluster, Request]] = {}  # one for points that ask for the same
    kinds: dict[str, list[tuple[Cluster, Request]]] = {}
    for cell in cells:
        config = cell.point.config
        if cell.do not in (Do.BEGIN, Do.GO_ON) or class_for(config).attended:
            continue
        key = repr(config.cluster)
        if key not in asked:
            cluster = cluster_of(config)
            asked[key] = cluster, cluster.request(cell.run.path, 0)
        kinds.setdefault(config.cluster.kind, []).append(asked[key])
    said: list[str] = []
    for kind, placed in kinds.items():
        try:
            with CLUSTERS.told(kind, "to be asked about the points"):
                most = at_once(cells[0].point.config.sweep.parallel)
                said += class_of(kind).foresee_all(placed, most)
        except ClusterError as error:
            said.append(f"the scheduler would say: {error}")
    return said


def row_of(cell: Cell) -> dict[str, Any]:
    """One row as values. `seconds`, `gpu_hours`: None where they are not known."""
    return {
        "folder": str(cell.run.path),
        "do": cell.do.value,
        "why": cell.why,
        "nodes": node_range(cell.point.config.cluster.nodes)[1],
        "seconds": seconds_of(cell),
        "gpu_hours": gpu_hours(cell),
    }


def print_cells(cells: Sequence[Cell], console: Console) -> None:
    """A row for each point, and what those that are to run take together."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("run", "point", "", "because", "nodes", "time at most", "GPU-hours"):
        right = heading in ("nodes", "time at most", "GPU-hours")
        table.add_column(heading, justify="right" if right else "left")
    varying = only_varying([cell.point.overrides for cell in cells])
    for cell, overrides in zip(cells, varying, strict=True):
        row = row_of(cell)
        words = " ".join(f"{k.rpartition('.')[2]}={v}" for k, v in overrides.items())
        todo = cell.do in (Do.BEGIN, Do.GO_ON)
        table.add_row(
            literal(cell.run.path.name, console),
            literal(words, console),
            literal(cell.do.value, console, STYLES[cell.do]),
            literal(cell.why, console),
            str(row["nodes"]),
            format_seconds(row["seconds"]) if todo else "",
            _hours(row["gpu_hours"]) if todo else "",
        )
    console.print(table)
    left = [cell for cell in cells if cell.do in (Do.BEGIN, Do.GO_ON)]
    hours = [gpu_hours(cell) for cell in left]
    known = sum(h for h in hours if h is not None) if None not in hours else None
    say(console, f"{plural(len(left), 'point')} of {len(cells)} to run, {_hours(known)} GPU-hours")


def _hours(value: float | None) -> str:
    return UNKNOWN if value is None else format_number(round(value, 3))
