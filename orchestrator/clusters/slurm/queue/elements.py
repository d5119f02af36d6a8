"""Which run is which element of an array: runs lie beside the array's script, and their folders are
called by their numbers.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from orchestrator.rundir.files import make_folder, names_in

ARRAYS = "arrays"  # the folder of scripts, beside the runs
NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")


def next_name(folder: Path) -> Path:
    """Return a numbered path in a folder that is not taken."""
    if not folder.is_dir():
        make_folder(folder)
    taken = [int(stem) for name in names_in(folder) if (stem := name.split(".")[0]).isdigit()]
    return folder / f"{max(taken, default=-1) + 1:03d}"


def is_element(run: Path, script: Path, job_id: str) -> bool:
    """Whether a job is an element of an array of this run's sweep, and may be this run.

    Args:
        script: that the scheduler knows the job by, without links.
        job_id: as in `123_4`.
    """
    index = job_id.partition("_")[2]
    if script.parent != Path(os.path.realpath(run.parent / ARRAYS)) or not index.isdigit():
        return False
    return bool(NUMBER.fullmatch(run.name)) and int(run.name) >= int(index)
