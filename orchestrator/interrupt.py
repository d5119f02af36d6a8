"""What Ctrl-C and `cancel` do: at first they end a command at once; a launcher that has a run
counts them.

Imports next to nothing: commands install the first handler before their own slow imports.
"""

from __future__ import annotations

import os
import signal
from typing import Any, Self

STOP_REQUEST = signal.SIGUSR1
"""What `orchestrator cancel` sends to a launcher: a second one asks for nothing more."""
COUNTED_ONCE = (STOP_REQUEST, signal.SIGHUP)


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, which may end it otherwise."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            caught = next(line for line in file if line.startswith("SigCgt:"))
    except (FileNotFoundError, ProcessLookupError):
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


# ------------------------------------------------------------------ before there is a run


def leave(*_: object) -> None:
    """End at once: before a run folder exists (see `Interrupts`) nothing needs cleaning up.

    This avoids KeyboardInterrupt, which libraries turn into errors of their own.
    """
    os.write(2, b"interrupted\n")
    os._exit(128 + signal.SIGINT)


def leave_at_interrupt() -> None:
    """Make Ctrl-C and `STOP_REQUEST` end this process by `leave`, unless they are ignored or
    handled already.
    """
    for number, default in (
        (signal.SIGINT, signal.default_int_handler),
        (STOP_REQUEST, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is default:
            signal.signal(number, leave)


def raise_at_interrupt() -> None:
    """Undo `leave_at_interrupt`: both raise `KeyboardInterrupt`."""
    for number in (signal.SIGINT, STOP_REQUEST):
        if signal.getsignal(number) is leave:
            signal.signal(number, signal.default_int_handler)


# ------------------------------------------------------------------ while a launcher has a run


class Interrupts:
    """Counts SIGINT and SIGTERM while it is entered, also more than once; restores the old handlers
    after. `STOP_REQUEST` counts once, however often it comes, and so does a terminal that closes
    (SIGHUP); under nohup the latter does not count at all.

    The first one asks a run to stop, or ends what shows it; a second one ends it at once.
    """

    def __init__(self) -> None:
        self.count = self._entered = 0
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if not self._entered:
            numbers = [signal.SIGINT, signal.SIGTERM, STOP_REQUEST]
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                numbers.append(signal.SIGHUP)
            for number in numbers:
                self._old[number] = signal.signal(number, self._handle)
        self._entered += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._entered -= 1
        if not self._entered:
            self.count = 0
            for number, handler in self._old.items():
                signal.signal(number, handler)

    def once(self) -> None:
        """Count one interrupt, unless there was one."""
        self.count = max(1, self.count)

    def _handle(self, number: int, _: object) -> None:
        self.count = max(1, self.count + (number not in COUNTED_ONCE))


interrupts = Interrupts()  # signals are the whole process's
