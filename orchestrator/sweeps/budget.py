"""What points would cost by their plans, and the limit that `budget.gpu_hours` sets."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.config.schema import Config, gpu_count, node_range
from orchestrator.errors import ConfigError
from orchestrator.sweeps.todo import Cell, Do


def seconds_of(cell: Cell) -> float | None:
    """How long a cell would run: by `facts.update_s`, else by the time limit that it asks for.

    None where neither is known.
    """
    config, updates = cell.point.config, cell.point.plan.updates
    if config.facts.update_s is not None and updates is not None:
        return config.facts.update_s * updates
    return None if config.cluster.time_min is None else 60.0 * config.cluster.time_min


def gpu_hours(cell: Cell) -> float | None:
    """GPUs times hours; 0 where no GPU is asked for, None where the time is not known."""
    gpus = gpus_of(cell.point.config)
    seconds = seconds_of(cell)
    if not gpus:
        return 0.0
    return None if seconds is None else gpus * seconds / 3600


def gpus_of(config: Config) -> int:
    """On all nodes together, of the most nodes."""
    return node_range(config.cluster.nodes)[1] * gpu_count(config.cluster.gpus_per_node)


def refuse_beyond(cells: Sequence[Cell]) -> None:
    """Raise `ConfigError` where what is to run costs more than `budget.gpu_hours`, or might."""
    limit = cells[0].point.config.budget.gpu_hours if cells else None
    if limit is None:
        return
    todo = [cell for cell in cells if cell.do in (Do.BEGIN, Do.GO_ON)]
    hours = [gpu_hours(cell) for cell in todo]
    unknown = [c.point.number for c, h in zip(todo, hours, strict=True) if h is None]
    if unknown:
        raise ConfigError(
            f"budget.gpu_hours={limit:g} cannot be kept: how long point {unknown[0]} runs is not "
            f"known; set facts.update_s, or the limit cluster.time_min"
        )
    total = sum(hour for hour in hours if hour is not None)
    if total > limit:
        raise ConfigError(
            f"the {len(todo)} points that are to run take {total:.3g} GPU-hours by their plans, "
            f"more than budget.gpu_hours={limit:g}"
        )
