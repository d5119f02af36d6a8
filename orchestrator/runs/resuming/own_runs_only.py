"""Whether this account may go on with a run: to go on is to run the code that the folder names."""

from __future__ import annotations

import os
from pathlib import Path

from orchestrator.errors import RunFolderError
from orchestrator.rundir.folder import RunDir

OVERFLOW = Path("/proc/sys/kernel/overflowuid")


def check_own(run: RunDir) -> None:
    """Raises `RunFolderError` when the folder is somebody else's.

    root's and nobody's pass: nobody but root makes such folders, and it is what file systems say
    that translate owners (NFS, containers).
    """
    owner = run.path.stat().st_uid
    nobody = int(OVERFLOW.read_text(encoding="ascii"))
    if owner not in {os.geteuid(), 0, nobody}:
        raise RunFolderError(
            f"{run.path} belongs to the user with number {owner}; to go on with a run is to run "
            f"the code that its folder names, so copy it and make sure of {run.config.name} first"
        )
