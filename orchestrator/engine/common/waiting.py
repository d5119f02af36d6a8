"""Records of what takes this process long: waits for other ranks, and declared work.

Groups record every wait for a collective. Code that saves, evaluates or prepares data says so:
such work may leave the processors unused for as long as a disk takes, and is not ended for that.
`trainer/agent_link.py` reports both to the agent (`agent/judge.py`).

There is one list for the process, since one thread may wait while the main thread computes.

`PatientDeadline` is the clock of waits that end by a limit: it stands still while other ranks work.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    since: float
    description: str
    numbers: tuple[int, ...]
    thread: int = field(default_factory=threading.get_ident)


LONGEST_WAIT_S = 7 * 24 * 3600.0
"""For a transport's own limits in a run, whose agents judge the waits; in milliseconds it fits into
32 bits.
"""
HCCL_MOST_S = 17_340
"""HCCL's own longest time-out of a collective, by its manual; it cannot be switched off."""
_lock = threading.Lock()
_under_way: list[_Wait] = []
_declared: list[_Wait] = []
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
    """Return when a wait for others, or declared work, began or ended last, by `time.monotonic`; 0
    before any.
    """
    return _last


# ----------------------------------------------------------------------
# Declared work.

_at_changes: list[Callable[[], None]] = []
BRIEF_S = 1.0
"""Work that takes less need not be reported at once: a heartbeat is no more frequent."""


@contextmanager
def declared(activity: str, *numbers: int, brief: bool = False) -> Generator[None]:
    """Declare that what happens inside may take long, and use no processor.

    Args:
        activity: what this rank does, as in "it saves the checkpoint", with a `%d` for each number.
        brief: it is usually over within `BRIEF_S`, and does not hold Python's interpreter: the next
            heartbeat reports it, so that it costs no message in each update.
    """
    global _last  # noqa: PLW0603  # as for waits
    entry = _Wait(time.monotonic(), activity, numbers)
    with _lock:
        _declared.append(entry)
        _last = time.monotonic()
    if not brief:
        _call_all(_at_changes)
    try:
        yield
    finally:
        with _lock:
            _declared.remove(entry)
            _last = time.monotonic()
        if not brief or _last - entry.since >= BRIEF_S:
            _call_all(_at_changes)


def _call_all(calls: Iterable[Callable[[], None]]) -> None:
    for call in calls:
        call()


def call_at_changes(call: Callable[[], None]) -> None:
    """Have `call` called when declared work begins and when it ends. What follows may hold Python's
    interpreter, and then no heartbeat could tell that the work is over.
    """
    _at_changes.append(call)


def declared_activity() -> str:
    """Return what this process has declared to do; "" for nothing.

    A thread that waits for other ranks within its declared work does not do that work now.
    """
    with _lock:
        waiting = {wait.thread for wait in _under_way}
        return " and ".join(
            entry.description % entry.numbers for entry in _declared if entry.thread not in waiting
        )


# ----------------------------------------------------------------------
# Limits of waits.


def hccl_exec_timeout(timeout_s: float) -> str:
    """Return the value of HCCL_EXEC_TIMEOUT for the longest collective."""
    return str(max(1, min(HCCL_MOST_S, math.ceil(timeout_s))))


_standstill_since: float | None = None
_is_judged = False


def note_standstill(seconds: float | None) -> None:
    """Note what the agents know: for how long all ranks have waited; None: some rank works."""
    global _standstill_since, _is_judged  # noqa: PLW0603  # all threads' waits obey the same
    _is_judged = True
    _standstill_since = None if seconds is None else time.monotonic() - seconds


class PatientDeadline:
    """Deadline of a wait for other ranks. In a run it counts only while all ranks wait: a rank that
    works (saves, evaluates, prepares data, computes) is waited for, however long it takes.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._began = timeout_s, time.monotonic()

    @property
    def over_s(self) -> float:
        """Seconds since the deadline; negative before it."""
        began = self._began
        if _is_judged:
            if _standstill_since is None:
                return -self._timeout_s
            began = max(began, _standstill_since)
        return time.monotonic() - began - self._timeout_s

    @property
    def passed(self) -> bool:
        return self.over_s > 0
