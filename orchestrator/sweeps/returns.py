"""What Hydra's sweepers are told of a point: its value, that it failed, or that it goes on."""

from __future__ import annotations

import math
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from orchestrator.errors import RunFailed
from orchestrator.report.tables.closing_table import describe_culprit
from orchestrator.run_folder.rundir import RunDir
from orchestrator.sweeps.todo import Cell


class NoSuchFigure(RunFailed):
    """A run has finished, and measured nothing of the objective's name."""


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
    try:
        made.return_value = measured(cell.run, cell.point.config.sweep.objective)
        made.status = JobStatus.COMPLETED
    except RunFailed as error:
        made.status, made.return_value = JobStatus.FAILED, error
    return made


def measured(run: RunDir, objective: str) -> float:
    """What a finished run measured. Raises `RunFailed` where that is no finite number, and its
    `NoSuchFigure` where there is none of this name.
    """
    result = run.read_result() or {}
    found = {**(result.get("metrics") or {}), **{k: result.get(k) for k in ("loss", "seconds")}}
    figures = {k: float(v) for k, v in found.items() if isinstance(v, int | float)}
    if objective not in figures:
        known = ", ".join(sorted(figures))
        raise NoSuchFigure(
            f"sweep.objective={objective}: {run.path} measured no such figure, but {known}"
        )
    if not math.isfinite(figures[objective]):
        raise RunFailed(f"its {objective} is {figures[objective]}")
    return figures[objective]
