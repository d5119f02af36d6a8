"""Points that wait for room on this machine: an empty file for each, in the folder of their sweep.

Who takes the file away has the point: the sweep's own process, which starts it, or `cancel
SWEEP/5`. What lies there counts for as long as that process lives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from orchestrator.rundir.files import make_folder, names_in
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.lock import is_held

REASON = "it waits for room on this machine"


def put(runs: Sequence[RunDir]) -> None:
    """Have points wait, in folders of sweeps that this process holds."""
    for run in runs:
        place = _place(run)
        if not place.parent.is_dir():
            make_folder(place.parent)
        place.touch(mode=0o600)


def take(run: RunDir) -> bool:
    """Have a point wait no longer. False where another was quicker, or it never did."""
    try:
        _place(run).unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def clear(runs: Sequence[RunDir]) -> None:
    """None of these points waits any more."""
    for run in runs:
        take(run)
    for folder in {_place(run).parent for run in runs}:
        with contextlib.suppress(OSError):  # others of the sweep still wait
            folder.rmdir()


def waits(run: RunDir) -> bool:
    return _place(run).exists() and is_held(RunDir(run.path.parent))


def waiting_in(sweep: Path) -> list[Path]:
    """The folders, made or not, of the points of a sweep that wait."""
    names = names_in(RunDir(sweep).waiting)
    return [sweep / name for name in names] if names and is_held(RunDir(sweep)) else []


def _place(run: RunDir) -> Path:
    return RunDir(run.path.parent).waiting / run.path.name
