"""What a rank's main thread hears from the thread of its lifeline, and is woken for."""

from __future__ import annotations

import threading
from collections.abc import Callable

from orchestrator.lifecycle.survival.agreement import Generation


class News:
    """The newest generation.

    Attributes:
        changed: whoever waits with this is woken when anything may have changed.
        interrupt: called at a newer generation: the main thread may wait for what will never come.
    """

    def __init__(self, first: Generation) -> None:
        self._latest, self._broken = first, None
        self.changed = threading.Condition()
        self.interrupt: Callable[[], None] = lambda: None

    @property
    def latest(self) -> Generation:
        """The newest that this rank knows of. Raises `RuntimeError` where it will hear of none."""
        if self._broken is not None:
            raise RuntimeError("the thread that hears of other ranks' ends broke") from self._broken
        return self._latest

    def tell(self, generation: Generation) -> None:
        """There is a newer one."""
        self._latest = generation
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
