"""Waiting for a condition with a deadline: the only way this package waits for anything."""

import time
from collections.abc import Callable

from slurm.errors import DevClusterError

_FIRST_PAUSE_SECONDS = 0.005
_LONGEST_PAUSE_SECONDS = 0.1


def becomes_true(condition: Callable[[], bool], *, seconds: float) -> bool:
    """Whether `condition` becomes true within `seconds`; asked often at first, then less so."""
    deadline = time.monotonic() + seconds
    pause = _FIRST_PAUSE_SECONDS
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return True


def wait_until(condition: Callable[[], bool], *, seconds: float, what: str) -> None:
    """Return as soon as `condition` is true; raise, naming `what`, if it is not in time."""
    if not becomes_true(condition, seconds=seconds):
        raise DevClusterError(f"waited {seconds:g} s in vain until {what}")
