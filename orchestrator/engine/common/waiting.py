"""Whether this process waits for other ranks just now: what tells a rank that hangs from one that
merely waits for it.

The groups say so around every wait for a collective; a rank's own watch (`signs_of_life.py`)
reads it. One count for the process, since a thread that sends may wait while the main thread
computes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

_lock = threading.Lock()
_waits = 0
_last = 0.0


@contextmanager
def for_others() -> Generator[None]:
    """Mark that what happens inside takes as long as other ranks take."""
    global _waits, _last  # noqa: PLW0603  # one count for the process is what is meant
    with _lock:
        _waits += 1
    try:
        yield
    finally:
        with _lock:
            _waits -= 1
            _last = time.monotonic()


def waits() -> bool:
    """Whether some thread of this process waits for other ranks."""
    return _waits > 0


def last_ended() -> float:
    """When a wait for others was over last, by `time.monotonic`; 0 before any."""
    return _last
