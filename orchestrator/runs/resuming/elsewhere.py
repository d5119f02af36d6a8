"""A run is resumed from where it was submitted, wherever somebody stands."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

from orchestrator.errors import RunFolderError
from orchestrator.rundir.folder import RunDir


def at_home(run: RunDir) -> contextlib.AbstractContextManager[None]:
    """Stand where the run was submitted: its relative paths and modules are meant from there.

    Raises:
        RunFolderError: that folder is gone.
    """
    return standing_in(Path(run.read_submission().get("folder") or Path.cwd()), run.path)


@contextlib.contextmanager
def standing_in(home: Path, asked: Path) -> Generator[None]:
    """`at_home` of what lies in `asked`. Raises `RunFolderError` likewise."""
    stood = Path.cwd()
    try:
        os.chdir(home)
    except OSError as error:
        raise RunFolderError(
            f"{asked} was submitted in {home}, where its relative paths and its code are, but "
            f"that folder cannot be entered: {error.strerror}"
        ) from error
    before = list(sys.path)
    sys.path[:] = _moved(before, stood, home)
    try:
        yield
    finally:
        sys.path[:] = before
        os.chdir(stood)


def _moved(path: Sequence[str], stood: Path, home: Path) -> list[str]:
    """Python's path, had it been started at `home`: what it has because somebody stands at `stood`
    is the other folder's; what names `stood` itself (an installed project, a full path in
    PYTHONPATH) stays.
    """
    given = os.environ.get("PYTHONPATH", "")
    relative = bool(given) and not {"", "."}.isdisjoint(given.split(os.pathsep))
    return [
        str(home) if entry == "" or (entry == str(stood) and (place == 0 or relative)) else entry
        for place, entry in enumerate(path)
    ]
