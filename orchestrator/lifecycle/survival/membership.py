"""A worker's membership in its run: the current generation, as the worker's agent sends it.

The agents watch the workers and each other, and their coordinator decides the next generation. A
worker asks nothing of other workers: it reports when it is ready to train, when it waits at a
boundary for newcomers, and when it ends; and it receives each new generation, whatever its main
thread does.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.engine.common import waiting
from orchestrator.errors import Fenced
from orchestrator.lifecycle.signs.signs_of_life import Life
from orchestrator.rundir.warnings import warn

LOOK_S = 0.2
Members = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """Members that train together. `noticed`: monotonic time at which this worker received it."""

    number: int
    members: Members
    noticed: float


class Membership:
    """Membership of one worker.

    Args:
        life: the worker's link to its agent.
        me: its number among the members (`members.py`).
        silence_s: how long the agents take to find a silent node.
    """

    def __init__(self, life: Life, me: int, silence_s: float) -> None:
        self._life, self._me, self._silence_s = life, me, silence_s
        self._changed = threading.Condition()
        self._latest = self._taken = self._kept = Generation(-1, (), time.monotonic())
        self._left = False
        self._received = 0.0
        self._interrupt: Callable[[], None] = lambda: None
        self.asked = False
        life.on_message(self._take)
        life.on_beat(self._end_unresponsive)

    def _take(self, message: Mapping[str, Any]) -> None:
        """Handle a message, from the thread that reads the link."""
        newer = None
        with self._changed:
            if message.get("generation", -1) > self._latest.number:
                newer = Generation(
                    message["generation"], tuple(message["members"]), time.monotonic()
                )
                self._latest, self._received, self.asked = newer, time.monotonic(), False
            self._left = self._left or message.get("left", False)
            self.asked = message.get("newcomers", self.asked)
            self._changed.notify_all()
        if newer is not None and newer.number > 0:
            self._interrupt()  # the main thread may wait for a lost worker

    @property
    def latest(self) -> Generation:
        """Return the newest generation that this worker has received."""
        return self._latest

    def begin(self, code: Mapping[str, str]) -> Generation:
        """Report that this worker is ready to train; wait for the first generation. Collective.

        Args:
            code: digests of the job's own modules, by name.
        """
        self._life.send_event("begins", code=dict(code))
        with self._changed:
            while self._latest.number < 0:
                self._changed.wait(LOOK_S)
            self._taken = self._latest
        return self._latest

    def join(self, stopped: Callable[[], bool]) -> Generation:
        """Ask to join, and wait for the generation that includes this worker.

        Raises:
            Fenced: the run ends, or is asked to stop, before that.
        """
        print("note: this rank asks to be let in", flush=True)  # goes to the rank's log
        self._life.send_event("joins")
        with self._changed:
            while self._me not in self._latest.members:
                if self._left:
                    raise Fenced("the run came to its end before this rank was let in")
                if stopped():
                    raise Fenced("the run is to stop, and this rank was not let in yet")
                self._changed.wait(LOOK_S)
            self._taken = self._latest
        return self._latest

    def ready(self, generation: int, updates: int) -> None:
        """Mark this worker ready at the boundary of `generation`, where it waits for newcomers."""
        self._life.send_event("ready", generation=generation, updates=updates)

    def await_newer(self, than: int, timeout_s: float) -> Generation | None:
        """Wait for a generation after `than`; return None at the timeout, or if none will come."""
        until = time.monotonic() + max(timeout_s, 3 * self._silence_s)
        with self._changed:
            while self._latest.number <= than and not self._left:
                if (left_s := until - time.monotonic()) <= 0:
                    break
                self._changed.wait(left_s)
            self._taken = self._latest
        return self._taken if self._taken.number > than else None

    def on_news(self, interrupt: Callable[[], None]) -> None:
        """Call `interrupt`, from another thread, when there is a newer generation."""
        self._interrupt = interrupt

    def end(self, word: str) -> None:
        """Report that this worker ends, in order or because it failed: no generation follows."""
        self._life.send_event("leaving", word=word)

    def _end_unresponsive(self) -> None:
        """End this process if its main thread does not return from an interrupted collective.

        gloo can lose a send whose connection breaks as it begins, and the others would wait. The
        only remaining worker holds the run's only state, so it waits for the collective's timeout.
        """
        wait = waiting.under_way() if waiting.waits() else None
        if wait is None or self._taken is self._latest or self._kept is self._latest:
            return
        since, words = wait
        late = time.monotonic() - self._received > self._silence_s
        if not words or not late or since > self._received:
            return
        message = (
            f"it did not come back from {words}, which was broken off {self._silence_s:g} s ago"
        )
        if len(self._latest.members) == 1:
            self._kept = self._latest
            warn(f"{message}; nobody else is left, so cluster.collective_timeout_s is waited out")
            return
        try:
            warn(f"{message}; it is ended, and the others go on without it")
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
