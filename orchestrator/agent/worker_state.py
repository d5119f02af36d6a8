"""State of one rank's newest process, as the coordinator knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator.agent.judge import Standing
from orchestrator.agent.liveness import RankPosition


@dataclass(slots=True)
class WorkerState:
    """State of one rank's newest process, as the coordinator knows it.

    Attributes:
        state: "expected" until its agent has connected.
        final_state: from its final message, "" without one; None while it runs, or if the others
            survived its loss.
        wants_to_join: a new worker that asks the others to let it in.
        code: digests of its job's modules, once it is ready to train; training: its loop has begun.
        awaits_newcomers: it is at a boundary of this generation, after so many updates, and waits
            for new workers.
        standing: what it does while it makes no progress, since `stands_since`, by the
            coordinator's clock; `program`: a user's program, whose waits look like idleness.
        can_save: whether it holds the state of its last boundary, and will leave its window to save
            it; None until it has answered that another worker failed.
        left_after: it has left its window, after so many updates; `failed`: by an error of its own.
        started: its agent reported its start; `exited`: its end, which was handled.
        given_up: the cause, if it is killed because it hangs.
        killed_at: when its agent was first asked to kill it.
        sleeps: it counts as ended, though SIGKILL has not ended it yet.
        report: its position, as it was sent last. Few are looked at, so it is read when it is.
        log_bytes: size of its log when its stack was requested.
    """

    rank: int
    incarnation: int = 0
    state: Literal["expected", "alive", "ended"] = "expected"
    wants_to_join: bool = False
    code: dict[str, str] | None = None
    training: bool = False
    awaits_newcomers: tuple[int, int] | None = None
    can_save: bool | None = None
    left_after: int | None = None
    failed: bool = False
    final_state: str | None = None
    standing: Standing = Standing.MOVES
    stands_since: float = 0.0
    program: bool = False
    started: bool = False
    exited: bool = False
    given_up: str = ""
    killed_at: float | None = None
    sleeps: bool = False
    report: Mapping[str, Any] = field(default_factory=dict[str, Any])
    log_bytes: int | None = None

    @property
    def is_gone(self) -> bool:
        return self.state == "ended" and not self.sleeps

    @property
    def seen(self) -> RankPosition:
        return RankPosition.from_json(self.report)
