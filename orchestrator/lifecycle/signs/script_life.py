"""Whether the batch script lives: it goes with its node, and ranks of other nodes may survive that.

Then nobody would end the job, or hand it back to the queue. So a process beside srun beats in a
small file of the attempt, as nodes do (`heartbeat.py`), and who leads the survivors looks for that.
"""

from __future__ import annotations

import os
import time

from orchestrator.rundir.files import open_nofollow
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.status import BEAT_DIGITS, read_beat

LOOK_S = 0.2


def beat(run: RunDir, attempt: int) -> None:
    """The script lives: the file says something new."""
    descriptor = open_nofollow(run.script_beat(attempt), os.O_WRONLY | os.O_CREAT)
    try:
        os.pwrite(descriptor, f"{time.monotonic():<{BEAT_DIGITS}.2f}".encode("ascii"), 0)
    finally:
        os.close(descriptor)


def is_silent(run: RunDir, attempt: int, timeout_s: float) -> bool:
    """Whether the script is gone; takes up to `timeout_s` to find out."""
    path, deadline = run.script_beat(attempt), time.monotonic() + timeout_s
    first = read_beat(path)
    while time.monotonic() < deadline:
        time.sleep(LOOK_S)
        if read_beat(path) != first:
            return False
    return True
