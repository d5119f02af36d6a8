"""What Hydra's sweepers are told of a point: its value, that it failed, or that it goes on."""

from __future__ import annotations

from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from orchestrator.errors import RunFailed
from orchestrator.report.tables.closing_table import describe_culprit
from orchestrator.sweeps.todo import Cell


def returned(cell: Cell, point: Any) -> JobReturn:
    """The point's `sweep.objective` where it has finished; a `RunFailed` where it has not.

    Args:
        point: as it was composed.
    """
    made = JobReturn(
        overrides=list(point.overrides),
        cfg=OmegaConf.create(),
        working_dir=str(cell.run.path),
        task_name="orchestrator.launch",
    )
    result = cell.run.read_result() if cell.run.config.exists() else None
    if result is None:
        made.status = JobStatus.UNKNOWN
        return made
    if result["state"] != "finished":
        made.status = JobStatus.FAILED
        culprit = result.get("culprit")
        made.return_value = RunFailed(
            describe_culprit(culprit) if culprit else f"{cell.run.path} was {result['state']}"
        )
        return made
    name = cell.point.config.sweep.objective
    measured = {**(result.get("metrics") or {}), **{k: result.get(k) for k in ("loss", "seconds")}}
    figures = {k: float(v) for k, v in measured.items() if isinstance(v, int | float)}
    if name not in figures:
        known = ", ".join(sorted(figures))
        made.status = JobStatus.FAILED
        made.return_value = RunFailed(
            f"sweep.objective={name}: {cell.run.path} measured no such figure, but {known}"
        )
        return made
    made.status, made.return_value = JobStatus.COMPLETED, figures[name]
    return made
