"""What a node knows of its ranks: which are alive, which stand still, how they ended.

Each rank sends a line a second (`trainer/agent_link.py`), and its agent reads them here.
It uses no files and nothing but the standard library, so that an agent starts fast.

A sign of life is a line or, without one, processor time: code that computes without letting
Python's other threads run (a compiler, say) is slow, not dead.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.agent.processes import stat_of
from orchestrator.config.schema import ClusterConfig
from orchestrator.rundir.files import open_nofollow
from orchestrator.rundir.status import BEAT_BYTES

BEAT_S = 1.0
LINK_VARIABLE = "ORCHESTRATOR_LIFE_SOCKET"
AT_WORK = 0.01
"""From this share of one processor on, a process that says nothing is at work."""
FROZEN = "it was frozen (SIGSTOP) for {} s (cluster.heartbeat_timeout_s)"
NO_SIGN = (
    "it gave no sign of life for {} s (cluster.heartbeat_timeout_s): code that holds Python's "
    "interpreter waits there for something"
)
ASLEEP = (
    "it slept in {} for {} s (cluster.hang_timeout_s), where nothing wakes it: a disk or a file "
    "system does not answer"
)
FINISHED, STOPPED, FAILED, EVICTED = "finished", "stopped", "failed", "fenced"


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Position of a rank, from its report of the last second.

    Attributes:
        at: "at micro-step 2 of 8 of update 3, in forward (train.py, line 31)".
        waits: "9 s at the boundary of update 3, for bucket 1 of 2"; "" if it does not wait.
        stack: of its main thread, innermost first: file, line, function.
    """

    at: str = ""
    waits: str = ""
    stack: tuple[tuple[str, int, str], ...] = ()

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Seen:
        stack = tuple((file, line, name) for file, line, name in said["stack"])
        return cls(at=said["at"], waits=said["waits"], stack=stack)

    def locate(self, cause: str) -> str:
        """Return `cause` with the rank's last position appended."""
        return f"{cause}; it was last seen {self.at}" if self.at else cause


@dataclass(slots=True)
class Neighbour:
    """State of one rank, as its node knows it. `heard`: monotonic time; 0 before."""

    pid: int
    heard: float = 0.0
    said: float = 0.0
    used_s: float = 0.0
    word: str = ""
    failure: dict[str, Any] | None = None
    behind: dict[str, Any] | None = None
    seen: Seen = Seen()
    reported: bool = False
    unread: bytes = b""


class NodeWatch:
    """Watch over the ranks of one node.

    Args:
        silence_s: without a sign of life for this long, a rank counts as lost.
        hang_s: the same for a rank that sleeps in the kernel: a disk may be slow.
    """

    def __init__(
        self, silence_s: float, hang_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._silence_s, self._hang_s, self._clock = silence_s, hang_s, clock
        self._looked = clock()
        self.ranks: dict[int, Neighbour] = {}

    def joined(self, rank: int, pid: int) -> None:
        self.ranks[rank] = Neighbour(pid=pid)

    def hear(self, rank: int, content: bytes) -> list[dict[str, Any]]:
        """Parse data received from a rank; return the messages other than plain heartbeats."""
        neighbour = self.ranks[rank]
        neighbour.heard, neighbour.reported = self._clock(), False
        *lines, neighbour.unread = (neighbour.unread + content).split(b"\n")
        news = [json.loads(line) for line in lines if line]
        for line in news:
            self.hear_message(rank, line)
        return news

    def hear_message(self, rank: int, line: Mapping[str, Any]) -> None:
        """Handle one message of a rank."""
        neighbour = self.ranks[rank]
        neighbour.heard, neighbour.reported = self._clock(), False
        neighbour.said = neighbour.heard
        neighbour.word = line.get("word", neighbour.word)
        neighbour.failure = line.get("failure", neighbour.failure)
        neighbour.behind = line.get("behind", neighbour.behind)
        if seen := line.get("seen"):
            neighbour.seen = Seen.from_json(seen)

    def silent_s(self, rank: int) -> float:
        """Return seconds since a rank's last message, ignoring its processor time.

        0 before its first message and after its last.
        """
        one = self.ranks[rank]
        return self._clock() - one.said if one.said and not one.word else 0.0

    def silent(self) -> list[int]:
        """Return ranks newly lost: no message and no processor time for `silence_s`.

        Time during which this process itself was suspended does not count.
        """
        now = self._clock()
        paused = max(0.0, now - self._looked - 3 * BEAT_S)
        self._looked = now
        lost: list[int] = []
        for rank, one in self.ranks.items():
            one.heard += paused if one.heard else 0.0
            one.said += paused if one.said else 0.0
            if one.word or one.reported or not one.heard or now - one.heard < 2 * BEAT_S:
                continue
            letter, used_s = stat_of(one.pid)
            if letter == "t" or used_s - one.used_s > AT_WORK * (now - one.heard):
                one.heard, one.used_s = now, used_s
            elif now - one.heard > (self._hang_s if letter == "D" else self._silence_s):
                one.reported = True
                lost.append(rank)
        return lost


# ----------------------------------------------------------------------
# Standstill detection: a main thread at one place longer than usual, without doing work.

USUAL = 3.0
LATEST = 3.0  # times heartbeat_timeout_s: when a standstill is reported at the latest
LOOKS = 4
"""How often processes are looked at during `notice_s`, once a place has lasted that long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """Time limits: when a standstill is reported, and when the rank is given up.

    Attributes:
        notice_s: nothing shorter is reported.
        most_s: it is reported at the latest after this, whatever was usual.
        hang_s: for how long neither the rank nor its children may leave the processors unused.
    """

    notice_s: float
    most_s: float
    hang_s: float

    @classmethod
    def of(cls, cluster: ClusterConfig) -> Patience:
        """Derive the limits so that a rank that is behind reports before the others' wait ends."""
        notice_s = cluster.heartbeat_timeout_s
        over_s = min(cluster.collective_timeout_s, cluster.rendezvous_timeout_s) / 2
        return cls(
            notice_s=min(notice_s, over_s),
            most_s=min(LATEST * notice_s, over_s),
            hang_s=cluster.hang_timeout_s,
        )


class Standstill:
    """How long the main thread has been at one place, sampled once a second.

    Attributes:
        reported: the standstill at the present place was reported.
    """

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._since = self._stood = self._longest = 0.0
        self.reported = False
        self._due = self._at_work = 0.0
        self._used_s: float | None = None

    def look(self, now: float, since: float, *, waits: bool) -> str:
        """Return what to report: "behind", "moves", or nothing.

        Args:
            since: when the main thread reached its present place, or its last wait there ended.
            waits: whether it waits for other ranks.
        """
        if since != self._since or waits:
            self._longest = max(self._longest, self._stood)
            self._since, self._stood = since, 0.0
            before, self.reported = self.reported, False
            self._used_s, self._due = None, since + self._patience.notice_s
            return "moves" if before else ""
        self._stood = now - since
        limit = max(self._patience.notice_s, USUAL * self._longest)
        if self.reported or self._stood <= min(limit, self._patience.most_s):
            return ""
        self.reported = True
        return "behind"

    def due(self, now: float) -> bool:
        """Return whether the standstill is long enough to inspect processes."""
        if not self._stood or now < self._due:
            return False
        self._due = now + min(self._patience.hang_s, self._patience.notice_s) / LOOKS
        return True

    def hangs(self, now: float, used_s: float) -> bool:
        """Return whether the processors were unused for `hang_s`.

        Args:
            used_s: processor time of the process and its children so far.
        """
        before, elapsed = self._used_s, max(BEAT_S, now - self._at_work)
        if before is None or used_s - before > AT_WORK * elapsed:
            self._used_s, self._at_work = used_s, now
        return now - self._at_work > self._patience.hang_s


# ----------------------------------------------------------------------
# The heartbeat file of a node: a number that grows, for `status` where the scheduler is silent.


def write_beat(path: Path, beat: int) -> None:
    """Write the node's newest beat over the one before it."""
    try:
        descriptor = open_nofollow(path, os.O_WRONLY | os.O_CREAT)
        try:
            os.pwrite(descriptor, f"{beat:<{BEAT_BYTES}}".encode("ascii"), 0)
        finally:
            os.close(descriptor)
    except OSError as error:  # a full disk: the heartbeat file alone decides nothing
        print(f"no heartbeat could be written: {error.strerror}", flush=True)
