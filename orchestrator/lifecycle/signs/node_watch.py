"""What is known on a node of its ranks: who lives, who stands still, who said its last word.

Each rank sends a line a second through a socket (`signs_of_life.py`); here they are read, by the
supervisor of a pretended node, or by the first rank of a real one. No files, and nothing but the
standard library, for a supervisor has to start at once.

A sign of life is a line, or, when none comes, processor time: code that computes without letting
Python's other threads run (a compiler, say) is slow, not dead.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEAT_S = 1.0
LINK_VARIABLE = "ORCHESTRATOR_LIFE_SOCKET"
AT_WORK = 0.01
"""From this share of one processor on, a process that says nothing is at work."""
STACK_S = 0.3
"""How long a rank that is asked for its stack (SIGQUIT) has to write it down."""
FROZEN = "it was frozen (SIGSTOP) for {} s (cluster.heartbeat_timeout_s)"
NO_SIGN = (
    "it gave no sign of life for {} s (cluster.heartbeat_timeout_s): code that holds Python's "
    "interpreter waits there for something"
)
FINISHED, STOPPED, FAILED, FENCED = "finished", "stopped", "failed", "fenced"


def processor_s(pid: int) -> float:
    """Processor time of a process so far, in seconds; 0.0 when it is gone."""
    return _stat(pid)[1]


def state_of(pid: int) -> str:
    """The kernel's letter for a process's state: T is stopped, t traced; X when it is gone."""
    return _stat(pid)[0]


def _stat(pid: int) -> tuple[str, float]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0.0
    values = text.rpartition(")")[2].split()  # the name before may hold anything
    ticks = int(values[11]) + int(values[12])
    return values[0], ticks / 100.0


@dataclass(slots=True)
class Neighbour:
    """One rank, as its node knows it. `heard`: when, by this process's own clock; 0 before."""

    pid: int
    heard: float = 0.0
    used_s: float = 0.0
    word: str = ""
    failure: dict[str, Any] | None = None
    behind: dict[str, Any] | None = None
    told: bool = False
    unread: bytes = b""


class NodeWatch:
    """The ranks of one node.

    Args:
        silence_s: after how long without a sign of life a rank counts as lost.
    """

    def __init__(self, silence_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._silence_s, self._clock = silence_s, clock
        self._looked = clock()
        self.ranks: dict[int, Neighbour] = {}

    def joined(self, rank: int, pid: int) -> None:
        self.ranks[rank] = Neighbour(pid=pid)

    def hear(self, rank: int, content: bytes) -> list[dict[str, Any]]:
        """Take what came from a rank; give the lines that say more than that it lives."""
        neighbour = self.ranks[rank]
        neighbour.heard, neighbour.told = self._clock(), False
        *lines, neighbour.unread = (neighbour.unread + content).split(b"\n")
        news = [json.loads(line) for line in lines if line]
        for line in news:
            neighbour.word = line.get("word", neighbour.word)
            neighbour.failure = line.get("failure", neighbour.failure)
            neighbour.behind = line.get("behind", neighbour.behind)
        return news

    def silent(self) -> list[int]:
        """Ranks that have just become lost: no line and no processor time for `silence_s`.

        Time during which this process itself stood still does not count: they may have, too.
        """
        now = self._clock()
        paused = max(0.0, now - self._looked - 3 * BEAT_S)
        self._looked = now
        lost: list[int] = []
        for rank, one in self.ranks.items():
            one.heard += paused if one.heard else 0.0
            if one.word or one.told or not one.heard or now - one.heard < 2 * BEAT_S:
                continue
            letter, used_s = _stat(one.pid)
            # one that is traced, or waits for a disk, may be slow
            if letter in "tD" or used_s - one.used_s > AT_WORK * (now - one.heard):
                one.heard, one.used_s = now, used_s
            elif now - one.heard > self._silence_s:
                one.told = True
                lost.append(rank)
        return lost
