"""Wait for a condition with a deadline; all waits of this package go through here."""

import time
from collections.abc import Callable
from typing import TypeVar

from slurm.errors import DevClusterError

_FIRST_PAUSE_SECONDS = 0.005
_LONGEST_PAUSE_SECONDS = 0.1
Value = TypeVar("Value")


def first_true(condition: Callable[[], Value], *, seconds: float) -> Value:
    """Return the first true value of `condition`, else its last, after `seconds`.

    It is called often at first, then less so.
    """
    deadline = time.monotonic() + seconds
    pause = _FIRST_PAUSE_SECONDS
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return value


def wait_until(condition: Callable[[], bool], *, seconds: float, what: str) -> None:
    """Return as soon as `condition` is true; raise, naming `what`, if it is not in time."""
    if not first_true(condition, seconds=seconds):
        raise DevClusterError(f"waited {seconds:g} s in vain until {what}")
