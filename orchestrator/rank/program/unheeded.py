"""Ranks of a program that never ask whether to stop, while others do: the stop waits for them."""

from __future__ import annotations

from orchestrator.inside.stop import read_number
from orchestrator.inside.variables import HEEDS, NOT_YET
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.warnings import warn

PATIENCE_S = 5.0  # in which a rank that asks after every update has asked


class Unheeded:
    """Looked at by rank 0's parent, from outside: rank 0 may be one that never asks."""

    def __init__(self, run: RunDir, attempt: int, size: int) -> None:
        self._folder, self._size = run.attempt(attempt), size
        self._asked, self._after = run.stop_asked(attempt), run.stop_after(attempt)
        self._since: float | None = None
        self._told = False

    def look(self, now: float) -> None:
        """Warn once when a stop was asked for some time ago, and only some ranks would heed it.

        Args:
            now: of the monotonic clock.
        """
        if self._told or read_number(str(self._asked)) == NOT_YET:
            return
        self._since = now if self._since is None else self._since
        if now - self._since < PATIENCE_S or read_number(str(self._after)) != NOT_YET:
            return
        self._told = True
        missing = [r for r in range(self._size) if not (self._folder / HEEDS.format(r)).exists()]
        if 0 < len(missing) < self._size:
            named = ", ".join(map(str, missing))
            warn(
                f"asked to stop, but rank {named} never called should_stop, which all ranks must "
                f"after every update; the stop waits for that",
                kind="not heeded",
            )
