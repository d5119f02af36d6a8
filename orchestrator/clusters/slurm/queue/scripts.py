"""What jobs of one run and arrays of many have in common: their names, and patience with sbatch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from orchestrator.errors import Interrupted, NotNow
from orchestrator.scheduler.client import SchedulerDown

PATIENCE_S = 60.0
LONGEST_PAUSE_S = 8.0
UNLIKE = ("job-name", "output")  # what differs between a sweep's points, and no limit is about


def patiently(
    action: Callable[[], Any], *, patience_s: float = PATIENCE_S, tell: Callable[[str], None]
) -> Any:
    """Do what needs a scheduler; while none answers, again and again for a bounded time.

    Raises:
        NotNow: none has answered, or `tell` has said by `Interrupted` to wait no longer.
    """
    began, pause = time.monotonic(), 1.0
    while True:
        try:
            return action()
        except SchedulerDown as error:
            waited = time.monotonic() - began
            if waited + pause > patience_s:
                raise NotNow(f"{error}\nnot submitted, though tried for {waited:.0f} s") from error
            try:
                tell(f"{error}; trying again for up to {patience_s - waited:.0f} s")
            except Interrupted as ended:
                raise NotNow(f"{error}\nnot submitted: {ended}") from error
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)


def script_name(attempt: int) -> str:
    """The batch script of an attempt, in a run's folder of what SLURM starts; no suffix."""
    return f"{attempt:03d}"
