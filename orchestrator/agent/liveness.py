"""Liveness of a node's workers, from their messages and from the kernel, as their agent sees it.

Each worker sends a line a second (`trainer/agent_link.py`). Without one, its state decides: a
process that uses a processor is busy, not dead, in code that holds Python's interpreter, say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.agent.processes import descendants, stat_of, state_of
from orchestrator.agent.stacks import Frame, as_lines
from orchestrator.config.schema import ClusterConfig

BEAT_S = 1.0
SUSPENDED_S = 3.0
"""Above this, the process itself was suspended between two polls."""
LINK_VARIABLE = "ORCHESTRATOR_AGENT_SOCKET"
AT_WORK = 0.01
"""From this share of one processor on, a process that sends nothing is at work."""
STOPPED_PROCESS, ASLEEP, SILENT, BUSY = "stopped", "asleep", "silent", "busy"
FINISHED, STOPPED, FAILED, EVICTED = "finished", "stopped", "failed", "evicted"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPosition:
    """Position of a rank, from its report of the last second.

    Attributes:
        at: "at micro-step 2 of 8 of update 3, in forward (train.py, line 31)".
        waits: "9 s at the boundary of update 3, for bucket 1 of 2"; "" if it does not wait.
        stack: of its main thread, innermost first.
        stood_s: for how long it has been there, if unusually long; else 0.
    """

    at: str = ""
    waits: str = ""
    stack: tuple[Frame, ...] = ()
    stood_s: float = 0.0

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RankPosition:
        stack = tuple(Frame(*frame) for frame in value["stack"])
        return cls(at=value["at"], waits=value["waits"], stack=stack, stood_s=value["stood_s"])

    def stack_lines(self) -> list[str]:
        return as_lines(self.stack)


@dataclass(slots=True)
class WorkerLiveness:
    """Signs of life of one worker. Times are by the clock of its agent.

    Attributes:
        received: when its last message came; 0 before the first.
        active: when it last sent a message or used a processor.
        used_s: its processor time then.
        stopped: since when it is stopped (SIGSTOP); 0 if it is not.
        program: it has become a user's program, which sends nothing, and may have children that do
            its work.
        final_state, failure: of its final message, if it came.
    """

    pid: int
    received: float = 0.0
    active: float = 0.0
    used_s: float = 0.0
    stopped: float = 0.0
    program: bool = False
    final_state: str = ""
    failure: dict[str, Any] | None = None
    seen: RankPosition = RankPosition()

    def receive(self, message: Mapping[str, Any], now: float) -> None:
        """Handle a message of the worker."""
        self.received = self.active = now
        self.used_s = stat_of(self.pid)[1]
        self.final_state = message.get("final_state", self.final_state)
        self.failure = message.get("failure", self.failure)
        if "program" in message:
            self.program, self.seen = True, RankPosition()
        elif "seen" in message and not self.program:
            self.seen = RankPosition.from_json(message["seen"])

    def unresponsive(self, now: float) -> tuple[str, float] | None:
        """Return the state of a worker that sends nothing, and for how long, in seconds: since it
        last used a processor, where it is silent or asleep. None for one that sends.

        Before its first message and after its last, only a stopped worker counts.
        """
        letter, used_s = stat_of(self.pid)
        if self.program and "T" in map(state_of, descendants(self.pid)):
            letter = "T"
        self.stopped = (self.stopped or now) if letter == "T" else 0.0
        if self.stopped:
            return STOPPED_PROCESS, now - self.stopped
        speaks = self.received and not self.final_state and not self.program
        if not speaks or now - self.received < 2 * BEAT_S:
            return None
        # A process that a debugger traces ("t") is not judged.
        if letter == "t" or used_s - self.used_s > AT_WORK * (now - self.active):
            self.active, self.used_s = now, used_s
        if now - self.active < 2 * BEAT_S:
            return BUSY, now - self.received
        return (ASLEEP if letter == "D" else SILENT), now - self.active


class AwakeClock:
    """Monotonic seconds without those in which this process was suspended: it received nothing
    then, which does not mean that others were silent. Call it more often than every `SUSPENDED_S`.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._polled, self._suspended = monotonic(), 0.0

    def __call__(self) -> float:
        now = self._monotonic()
        if now - self._polled > SUSPENDED_S:
            self._suspended += now - self._polled
        self._polled = now
        return now - self._suspended


# ----------------------------------------------------------------------
# Hangs: processes that do no work; a main thread at one position longer than usual.


class IdleTimer:
    """Time for which processes have left the processors unused; they hang after `hang_s`."""

    def __init__(self, hang_s: float) -> None:
        self._hang_s, self._at_work = hang_s, 0.0
        self._used_s: float | None = None

    def reset(self) -> None:
        """Begin again with the next sample."""
        self._used_s = None

    def hangs(self, now: float, used_s: float) -> bool:
        """Return whether the processes, of which `used_s` is the processor time, hang."""
        before, elapsed = self._used_s, max(BEAT_S, now - self._at_work)
        if before is None or used_s - before > AT_WORK * elapsed:
            self._used_s, self._at_work = used_s, now
        return now - self._at_work > self._hang_s


USUAL = 3.0
LATEST = 3.0  # times heartbeat_timeout_s: when a standstill is reported at the latest
LOOKS = 4
"""Checks of processes during `notice_s`, once a position has lasted that long."""


class ProgressWatchdog:
    """Time that the main thread has been at one position, sampled once a second.

    Args:
        notice_s: nothing shorter is reported.
        most_s: a standstill is reported at the latest after this, whatever was usual.
        hang_s: for how long neither the rank nor its children may leave the processors unused.

    Attributes:
        reported: the standstill at the present position was reported.
        idle: the rank's and its children's work at that position.
    """

    def __init__(self, *, notice_s: float, most_s: float, hang_s: float) -> None:
        self._notice_s, self._most_s, self._hang_s = notice_s, most_s, hang_s
        self._since = self._stood = self._longest = self._due = 0.0
        self.reported, self.idle = False, IdleTimer(hang_s)

    @classmethod
    def of(cls, cluster: ClusterConfig) -> ProgressWatchdog:
        """Derive the limits so that a rank that is behind reports before the others' wait ends."""
        notice_s = cluster.heartbeat_timeout_s
        over_s = min(cluster.collective_timeout_s, cluster.rendezvous_timeout_s) / 2
        return cls(
            notice_s=min(notice_s, over_s),
            most_s=min(LATEST * notice_s, over_s),
            hang_s=cluster.hang_timeout_s,
        )

    def look(self, now: float, since: float, *, waits: bool) -> str:
        """Return what to report: "behind", "moves", or nothing.

        Args:
            since: when the main thread reached its present position, or its last wait there ended.
            waits: whether it waits for other ranks.
        """
        if since != self._since or waits:
            self._longest = max(self._longest, self._stood)
            self._since, self._stood = since, 0.0
            before, self.reported = self.reported, False
            self.idle.reset()
            self._due = since + self._notice_s
            return "moves" if before else ""
        self._stood = now - since
        limit = max(self._notice_s, USUAL * self._longest)
        if self.reported or self._stood <= min(limit, self._most_s):
            return ""
        self.reported = True
        return "behind"

    def due(self, now: float) -> bool:
        """Return whether the standstill is long enough to inspect processes."""
        if not self._stood or now < self._due:
            return False
        self._due = now + min(self._hang_s, self._notice_s) / LOOKS
        return True
