"""The one owner of signals in a rank: a handler only sets a flag.

The flag travels with the next boundary's reduction, so all ranks stop after the same update.
Nothing else in a worker may install a handler for these signals.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class StopFlag:
    """Flag set by a stop signal and read by the loop.

    Attributes:
        signal: the latest one, None before any.
        time: by `time.monotonic`, when the first one came; 0 before.
        times: when the first of each kind came.
        received: how many came.
        asked: a stop was requested other than by a signal.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.time = 0.0
        self.times: dict[signal.Signals, float] = {}
        self.received = 0
        self.asked = False
        self._pid = os.getpid()

    @property
    def requested(self) -> bool:
        return self.asked or self.signal is not None

    @property
    def words(self) -> str:
        """Describe the signal for people."""
        return "asked to stop" + (f" by {self.signal.name}" if self.signal else "")

    def install(self) -> StopFlag:
        """Install the handlers, then unblock the signals.

        They may have been blocked before this process began, so that a stop while Python starts
        is kept, not fatal.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if os.getpid() != self._pid:  # a forked child (a loader worker): not its flag to set
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.take(signal.Signals(number))

    def take(self, number: signal.Signals) -> None:
        """Record a stop signal, to this process or to its agent."""
        self.signal = number
        now = time.monotonic()
        self.time = self.time or now
        self.times.setdefault(self.signal, now)
        self.received += 1
