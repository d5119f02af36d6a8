"""Signs of life between nodes, for the one failure that SLURM does not see.

When a node's tasks and their step daemon die together while its slurmd lives, the job stays RUNNING
and the other ranks wait for ever. So the first rank of each node counts up in a small file every
two seconds, and watches the next node's: a ring, so there is no all-to-one traffic. What is
watched is whether the number changes, by the watcher's own clock; clocks of different nodes never
meet. Behind the number stands what that rank waits for, for who asks why others did.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.rundir.files import open_nofollow, read_text
from orchestrator.rundir.status import BEAT_BYTES, BEAT_DIGITS, BEAT_ENDED, BEAT_S, read_beat
from orchestrator.rundir.warnings import warn

FENCE_EVERY = 2


def read_waits(path: Path) -> str:
    """For how long, where and for what the node's first rank waited last; "" where it did not."""
    return _read(path)[BEAT_DIGITS:].strip()


def _read(path: Path) -> str:
    try:
        return read_text(path, at_most=BEAT_BYTES)
    except FileNotFoundError:
        return ""


def pause_s(timeout_s: float) -> float:
    """Seconds between two beats where a silence of `timeout_s` has to be noticed."""
    return min(BEAT_S, timeout_s / 4)


@dataclass(slots=True)
class Silence:
    """For how long a file has not changed, as far as this watcher can tell.

    Time during which the watcher itself stood still (a hanging file system, a suspended machine)
    does not count: the others may have stood still with it.
    """

    timeout_s: float
    clock: Callable[[], float] = time.monotonic
    _beat: str = ""
    _since: float = 0.0
    _looked: float = field(default=0.0)

    def forget(self) -> None:
        """What was seen so far means nothing."""
        self._beat = ""

    def exceeded(self, beat: str) -> bool:
        """Take the latest beat; whether the silence has lasted too long."""
        now = self.clock()
        usual = 3 * pause_s(self.timeout_s)
        paused = max(0.0, now - self._looked - usual) if self._looked else 0.0
        self._looked = now
        self._since += paused
        if beat != self._beat or beat in ("", BEAT_ENDED):
            self._beat, self._since = beat, now
            return False
        return now - self._since > self.timeout_s


class Heartbeat:
    """Beats for this node and watches the next one, from a thread of its own.

    Args:
        path_of: where the node of a number beats.
        on_silence: called once, with the index of the node that stopped answering.
        superseded: asked now and then; once it says yes, there are no more beats.
        waits: what this rank waits for, in ASCII; "" where it does not.
    """

    def __init__(
        self,
        path_of: Callable[[int], Path],
        *,
        node_index: int,
        nodes: int,
        timeout_s: float,
        on_silence: Callable[[int], None],
        superseded: Callable[[], bool],
        waits: Callable[[], str] = str,
    ) -> None:
        self._own = path_of(node_index)
        self._watched = (node_index + 1) % nodes if nodes > 1 else None
        self._path = path_of(self._watched or 0)
        self._silence, self._pause_s = Silence(timeout_s=timeout_s), pause_s(timeout_s)
        self._on_silence, self._superseded, self._waits = on_silence, superseded, waits
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat_on, name="heartbeat", daemon=True)

    def start(self) -> Heartbeat:
        self._write("0")
        self._thread.start()
        return self

    def watch_nobody(self) -> None:
        """Whoever falls silent from now on is missed by others (`lifecycle/survival/`)."""
        self._watched = None

    def end(self) -> None:
        """Say that this node has ended in order: its silence from now on means nothing."""
        self._over.set()
        self._thread.join(timeout=5.0)
        self._write(BEAT_ENDED)

    def _write(self, beat: str) -> None:
        try:
            descriptor = open_nofollow(self._own, os.O_WRONLY | os.O_CREAT)
            try:
                words = f"{beat:<{BEAT_DIGITS}}{self._waits()}"[:BEAT_BYTES]
                os.pwrite(descriptor, f"{words:<{BEAT_BYTES}}".encode("ascii", "replace"), 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            # Where the disk is full, the others' beats do not get there either: nobody is judged.
            self._silence.forget()
            warn(f"no heartbeat could be written: {error.strerror}", kind="no heartbeat")

    def _beat_on(self) -> None:
        count = 0
        while not self._over.wait(self._pause_s):
            count += 1
            self._write(str(count))
            if count % FENCE_EVERY == 0 and self._superseded():
                return
            if self._watched is None:
                continue
            if self._silence.exceeded(read_beat(self._path)):
                self._on_silence(self._watched)
                return
