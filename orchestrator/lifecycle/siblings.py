"""The other ranks of a node, as its first rank sees them: processes of the same step daemon.

One that is stopped (SIGSTOP) can say nothing, and its peers would wait for it for ever. The kernel
shows it; no rank has to write a file. Where ranks do not see each other's processes (a container of
its own for each), nobody is found, and nobody is judged.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from orchestrator.lifecycle.node_watch import BEAT_S, state_of

RANK = b"SLURM_PROCID="
STEP = b"SLURM_STEP_ID="


def _variables(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # gone, or somebody else's
        return []


def ranks_beside() -> dict[int, int]:
    """Process ids of this node's other ranks, by rank: children of this process's parent."""
    mine = [v for v in _variables(os.getpid()) if v.startswith(STEP)]
    found: dict[int, int] = {}
    for path in Path(f"/proc/{os.getppid()}/task").glob("*/children"):
        for pid in map(int, path.read_text(encoding="ascii").split()):
            variables = _variables(pid)
            rank = next((v[len(RANK) :] for v in variables if v.startswith(RANK)), b"")
            if pid != os.getpid() and rank.isdigit() and all(v in variables for v in mine):
                found[int(rank)] = pid
    return found


class Siblings:
    """Looks once a beat for ranks that are stopped.

    Args:
        count: how many there are.
        timeout_s: for how long one may be stopped.
    """

    def __init__(
        self, count: int, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._count, self._timeout_s, self._clock = count, timeout_s, clock
        self._pids: dict[int, int] = {}
        self._stopped: dict[int, float] = {}  # rank: when it was first seen so
        self._looked = clock()

    def lost(self) -> tuple[int, int] | None:
        """Rank and process id of one that has been stopped for too long. A time in which this
        process stood still itself does not count.
        """
        now = self._clock()
        paused, self._looked = max(0.0, now - self._looked - 3 * BEAT_S), now
        if len(self._pids) < self._count:
            self._pids = ranks_beside()
        for rank, pid in self._pids.items():
            if state_of(pid) != "T":
                self._stopped.pop(rank, None)
                continue
            since = self._stopped[rank] = self._stopped.get(rank, now) + paused
            if now - since > self._timeout_s:
                return rank, pid
        return None
