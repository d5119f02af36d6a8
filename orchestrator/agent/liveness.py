"""Liveness of a node's workers, from their messages and from the kernel, as their agent sees it.

Each worker sends a line a second with its position (`trainer/agent_link.py`). The agent judges its
progress by that (`judge.py`); here is what says that it lives: its messages, and SIGSTOP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from orchestrator.agent.processes import descendants, state_of
from orchestrator.agent.stacks import Frame, as_lines

BEAT_S = 1.0
LEAST_SILENCE_S = 2.5 * BEAT_S
"""A live agent, which sends a heartbeat every `BEAT_S`, may be as late as this."""
SUSPENDED_S = 3.0
"""Above this, the process itself was suspended between two polls."""
LINK_VARIABLE = "ORCHESTRATOR_AGENT_SOCKET"
FINISHED, STOPPED, FAILED, EVICTED = "finished", "stopped", "failed", "evicted"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPosition:
    """Position of a rank, from its report of the last second.

    Attributes:
        at: "at micro-step 2 of 8 of update 3, in forward (train.py, line 31)".
        where: the same without the line of code: "micro-step 2 of 8 of update 3".
        waits: "9 s at the boundary of update 3, for bucket 1 of 2"; "" if it does not wait.
        waited_s: for how long it has waited for other ranks; 0 if it does not.
        declared: "it saves the checkpoint after update 30", if it says so; see
            `engine/common/waiting.py`.
        stack: of its main thread, innermost first.
        stood_s: for how long it has been there.
    """

    at: str = ""
    where: str = ""
    waits: str = ""
    waited_s: float = 0.0
    declared: str = ""
    stack: tuple[Frame, ...] = ()
    stood_s: float = 0.0

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RankPosition:
        known: dict[str, Any] = dict(value)
        known["stack"] = tuple(Frame(*frame) for frame in value.get("stack", ()))
        return cls(**known)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults: each rank sends them once a second."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value != DEFAULTS[name]}

    def stack_lines(self) -> list[str]:
        return as_lines(self.stack)


DEFAULTS = {field.name: field.default for field in fields(RankPosition)}


@dataclass(slots=True)
class WorkerLiveness:
    """Signs of life of one worker. Times are by the clock of its agent.

    Attributes:
        received: when its last message came; 0 before the first.
        stopped: since when it is stopped (SIGSTOP); 0 if it is not.
        program: it has become a user's program, which sends nothing, and may have children that do
            its work.
        final_state, failure: of its final message, if it came.
    """

    pid: int
    received: float = 0.0
    stopped: float = 0.0
    program: bool = False
    final_state: str = ""
    failure: dict[str, Any] | None = None
    seen: RankPosition = RankPosition()

    def receive(self, message: Mapping[str, Any], now: float) -> None:
        """Handle a message of the worker."""
        self.received = now
        self.final_state = message.get("final_state", self.final_state)
        self.failure = message.get("failure", self.failure)
        if "program" in message:
            self.program, self.seen = True, RankPosition()
        elif "seen" in message and not self.program:
            self.seen = RankPosition.from_json(message["seen"])

    def stopped_s(self, now: float) -> float | None:
        """Return for how long it has been stopped (SIGSTOP), in seconds; None if it is not."""
        letter = state_of(self.pid)
        if self.program and "T" in map(state_of, descendants(self.pid)):
            letter = "T"
        self.stopped = (self.stopped or now) if letter == "T" else 0.0
        return now - self.stopped if self.stopped else None


class AwakeClock:
    """Monotonic seconds without those in which this process was suspended: it received nothing
    then, which does not mean that others were silent. Call it more often than every `SUSPENDED_S`.

    Attributes:
        suspended_s: for how long it was, in all.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._polled, self.suspended_s = monotonic(), 0.0

    def __call__(self) -> float:
        now = self._monotonic()
        if now - self._polled > SUSPENDED_S:
            self.suspended_s += now - self._polled
        self._polled = now
        return now - self.suspended_s
