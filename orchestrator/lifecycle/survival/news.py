"""What a rank's main thread hears from the thread of its lifeline, and is woken for.

A transport may lose what it was waiting for when a peer died, and not come back at any interrupt
(gloo, where a connection breaks in the very moment in which it begins to send). Such a rank holds
up all others, so it ends as one that was killed does, and they go on without it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

from orchestrator.engine.common import waiting
from orchestrator.lifecycle.survival.agreement import Generation
from orchestrator.rundir.warnings import warn


class News:
    """The newest generation.

    Attributes:
        changed: whoever waits with this is woken when anything may have changed.
        interrupt: called at a newer generation: the main thread may wait for what will never come.
    """

    def __init__(self, first: Generation) -> None:
        self._latest = self._taken = self._stays = first
        self._told, self._broken = 0.0, None
        self.changed = threading.Condition()
        self.interrupt: Callable[[], None] = lambda: None

    @property
    def latest(self) -> Generation:
        """The newest that this rank knows of. Raises `RuntimeError` where it will hear of none."""
        if self._broken is not None:
            raise RuntimeError("the thread that hears of other ranks' ends broke") from self._broken
        return self._latest

    def take(self, than: int) -> Generation | None:
        """`latest`, if it comes after `than`. For the main thread: it has come back from whatever
        it waited for.
        """
        self._taken = self.latest
        return self._taken if self._taken.number > than else None

    def tell(self, generation: Generation) -> None:
        """There is a newer one."""
        self._latest, self._told = generation, time.monotonic()
        self.wake()
        self.interrupt()

    def end(self, error: Exception) -> None:
        """The thread is broken."""
        self._broken = error
        self.wake()
        self.interrupt()

    def wake(self) -> None:
        """Let those who wait look again."""
        with self.changed:
            self.changed.notify_all()

    def end_unheeded(self, awake: float, patience_s: float) -> None:
        """End this process where its main thread has not come back from a collective that was
        broken off so long ago; not where it computes. Who is the only one has all that is left of
        the run, so it is only said; the collective's own time-out ends it.

        Args:
            awake: since when this process has not stood still, monotonic.
        """
        wait = waiting.under_way() if waiting.waits() else None
        if wait is None or self._taken is self._latest or self._stays is self._latest:
            return
        since, words = wait
        late = time.monotonic() - max(self._told, awake) > patience_s
        if not words or not late or since > self._told:
            return
        told = f"it did not come back from {words}, which was broken off {patience_s:g} s ago; "
        if len(self._latest.members) == 1:
            self._stays = self._latest
            warn(f"{told}nobody else is left, so cluster.collective_timeout_s is waited out")
            return
        try:
            warn(f"{told}it is ended, and the others go on without it")
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
