"""A sweep's folder, in which one command works at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path

from orchestrator.errors import RunFolderError
from orchestrator.outcome.lock_holder import held
from orchestrator.run_folder.rundir import RunDir


@contextlib.contextmanager
def alone_in(folder: Path) -> Generator[None]:
    """Hold a sweep's folder; one that nothing came to is removed again. Raises `RunFolderError`
    while another start does.
    """
    with contextlib.ExitStack() as until_the_end:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            until_the_end.enter_context(held(RunDir(folder)))
        except OSError as error:
            raise RunFolderError(f"{folder} cannot be written: {error.strerror}") from error
        until_the_end.callback(_remove_if_empty, RunDir(folder))
        yield


def _remove_if_empty(sweep: RunDir) -> None:
    if {entry.name for entry in sweep.path.iterdir()} <= {sweep.lock.name}:
        sweep.lock.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody has put something there meanwhile
            sweep.path.rmdir()
