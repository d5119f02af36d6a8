"""Which run is which element of an array: runs lie beside the array's script, and their folders are
called by their numbers.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

ARRAYS = "arrays"  # the folder of scripts, beside the runs
NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")


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
