"""Records of waits for other ranks, which tell a rank that hangs from one that waits for it.

Groups record every wait for a collective; `trainer/agent_link.py` reads the records.
There is one list for the process, since one thread may wait while the main thread computes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    since: float
    description: str
    numbers: tuple[int, ...]


_lock = threading.Lock()
_under_way: list[_Wait] = []
_last = 0.0
_failed_wait: tuple[float, str] | None = None


@contextmanager
def for_others(description: str = "", *numbers: int) -> Generator[None]:
    """Mark that what happens inside takes as long as other ranks take.

    Args:
        description: of what is awaited, with a `%d` for each number. Nested waits are reported
            together.
    """
    global _last, _failed_wait  # noqa: PLW0603  # waits are counted for the process
    wait = _Wait(time.monotonic(), description, numbers)
    with _lock:
        _under_way.append(wait)
    try:
        yield
    except BaseException:
        _failed_wait = _failed_wait or under_way()
        raise
    else:
        _failed_wait = None
    finally:
        with _lock:
            _under_way.remove(wait)
            _last = time.monotonic()


def waits() -> bool:
    """Return whether some thread of this process waits for other ranks."""
    return bool(_under_way)


def under_way() -> tuple[float, str] | None:
    """Return since when this process waits for others (`time.monotonic`), and for what.

    A wait that failed counts until another has ended well, since its failure may yet be reported.
    """
    with _lock:
        if not _under_way:
            return _failed_wait
        awaited = [w.description % w.numbers for w in _under_way if w.description]
        return _under_way[0].since, ", ".join(awaited)


def last_ended() -> float:
    """Return when a wait for others ended last, by `time.monotonic`; 0 before any."""
    return _last
