"""How a run stands and who failed it, as values."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class State(enum.Enum):
    """Where a submission stands, in the words of result.json where it has ended."""

    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        return self in (State.FINISHED, State.STOPPED, State.FAILED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Culprit:
    """Who failed first. `cause` is a sentence or a few; `usage`: what was asked for was wrong;
    `hangs`: others waited for it in vain.
    """

    rank: int | None
    node: str
    cause: str
    log_tail: tuple[str, ...] = ()
    usage: bool = False
    hangs: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "node": self.node,
            "cause": self.cause,
            "log_tail": list(self.log_tail),
        }
