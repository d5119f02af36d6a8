"""`resume SWEEP`: the points that have not finished go on, by what lies in the sweep's folder."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.errors import RunFolderError
from orchestrator.outcome.folder_status import OVER, RunStatus
from orchestrator.run_folder.rundir import RunDir
from orchestrator.runs.console import Manner
from orchestrator.runs.resuming.resumption import resumption
from orchestrator.runs.start import config_of, prepare
from orchestrator.runs.status import statuses
from orchestrator.sweeps.points import Point
from orchestrator.sweeps.sweep import Sweep
from orchestrator.sweeps.todo import Cell, Do


def resume_sweep(
    folder: Path,
    runs: Sequence[RunDir],
    manner: Manner,
    overrides: Sequence[str] = (),
    config_dir: str | None = None,
) -> int:
    """Let all go on that were stopped, cancelled or failed, or never submitted; the exit code.

    Args:
        overrides: of each point, as `resume RUN` takes them.

    Raises:
        RunFolderError: a point cannot be read, or another command is at work in the sweep's folder.
        ConfigError: a point cannot take the overrides. Nothing was started then.
    """
    if RunDir(folder).search.exists():
        from orchestrator.sweeps.search.start import resume_search

        return resume_search(folder, manner, overrides, config_dir)
    with contextlib.ExitStack() as open_until_the_end:
        sweep = Sweep(manner, open_until_the_end, search=False)
        sweep.hold(folder)
        found = statuses(runs)[0]
        sweep.place([_cell(s, n, overrides, config_dir) for n, s in enumerate(found)])
        return sweep.finish()


def _cell(status: RunStatus, number: int, overrides: Sequence[str], config_dir: str | None) -> Cell:
    """A point as its folder tells it, and what is to be done with it."""
    run = RunDir(status.folder)
    if status.state in ("damaged", "private"):
        raise RunFolderError(
            f"nothing was started: {status.reason}; the line of the sweep, typed again, begins "
            f"such a point anew"
        )
    config = config_of(run)
    do = Do.WAIT
    if status.state in OVER:
        asked = resumption(run, config, overrides, config_dir)
        trained = status.state == "finished" and not (asked.total or 0) > status.updates
        do, config = (Do.NOTHING, config) if trained else (Do.GO_ON, asked.config)
    config = replace(config, run=replace(config.run, dir=str(run.path)))
    point = Point(
        number=int(run.path.name) if run.path.name.isdigit() else number,
        overrides=tuple(run.read_submission().get("overrides") or ()),
        config=config,
        plan=prepare(config, new=False),
    )
    return Cell(point=point, do=do, why=status.state, made_of={})
