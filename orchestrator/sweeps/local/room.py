"""What this machine has room for: how many runs at once, by their cores, memory and GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.clusters.api import Share
from orchestrator.clusters.machine import Machine, free_memory_bytes
from orchestrator.report.units import format_bytes, plural

RANK_BYTES = 512 << 20
"""What a rank is taken to need before one has been measured: a framework's import is most of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What one run has taken. `gpus`: by name; none where it computes without."""

    share: Share | None
    gpus: tuple[str, ...]


class Room:
    """What is free here, and who has taken how much of it.

    A run that is larger than the machine has it to itself. What nobody can know before is how much
    memory a run will need: its ranks are taken for as large as the largest that was measured.

    Args:
        most: runs at once, also where they have to share cores; None: as many as there are cores
            for. GPUs are never shared, and memory has to suffice in either case.
        machine: as it was before the first of them.
    """

    def __init__(self, most: int | None = None, machine: Machine | None = None) -> None:
        self.most, self._machine = most, machine or Machine.here()
        self._rank_bytes, self._measured = RANK_BYTES, False
        self._taken: list[Place] = []

    def has(self, share: Share | None) -> bool:
        """Whether there is room for a run now; what is larger than the machine waits until it has
        it to itself.
        """
        if not self._taken:
            return True
        if share is None or not self._holds([*(place.share for place in self._taken), share]):
            return False
        return free_memory_bytes() >= share.ranks * self._rank_bytes

    def take(self, share: Share | None) -> Place | None:
        """Room for a run; None where it has to wait for others to end."""
        if not self.has(share):
            return None
        used = {name for place in self._taken for name in place.gpus}
        free = [name for name in self._machine.gpus if name not in used]
        place = Place(share=share, gpus=tuple(free[: self._gpus_of(share)]))
        self._taken.append(place)
        return place

    def give_back(self, place: Place, result: Mapping[str, Any] | None = None) -> None:
        """A run has ended.

        Args:
            result: its result.json, which says how much memory its ranks needed.
        """
        self._taken.remove(place)
        peaks = [size for size in (result or {}).get("peak_memory_bytes") or () if size]
        if peaks:
            known = self._rank_bytes if self._measured else 0
            self._rank_bytes, self._measured = max(known, *peaks), True

    def at_once(self, shares: Sequence[Share | None]) -> int:
        """How many of such runs it holds at once, the small ones first."""
        able = sorted((s for s in shares if s), key=lambda s: (s.gpus, s.cores, s.ranks))
        most = min(len(able), self.most or len(able))
        return next((n for n in range(most, 1, -1) if self._holds(able[:n])), 1)

    def remark(self, shares: Sequence[Share | None]) -> str | None:
        """What is to be said where `most` is more than this machine is made for."""
        able = [s for s in shares if s]
        wanted = min(self.most or 1, len(able))
        if wanted < 2:
            return None
        found, needed = self.at_once(shares), wanted * max(s.cores for s in able)
        if found < wanted:
            gpus = plural(len(self._machine.gpus), "GPU")
            free, each = map(format_bytes, (self._machine.free_memory_bytes, self._rank_bytes))
            return (
                f"sweep.parallel={self.most}: this machine has room for {plural(found, 'point')} "
                f"at once ({gpus}, {free} of memory free, {each} a rank)"
            )
        if needed > self._machine.cores:
            return (
                f"sweep.parallel={self.most}: {wanted} points at once ask for {needed} cores, and "
                f"this machine has {self._machine.cores}, so that each of them takes longer; "
                f"sweep.parallel=auto starts as many as it has cores for"
            )
        return None

    def _holds(self, shares: Sequence[Share | None]) -> bool:
        able = [share for share in shares if share]
        return (
            len(able) == len(shares) <= (self.most or len(shares))
            and (self.most is not None or sum(s.cores for s in able) <= self._machine.cores)
            and sum(map(self._gpus_of, able)) <= len(self._machine.gpus)
            and sum(s.ranks for s in able) * self._rank_bytes <= self._machine.free_memory_bytes
        )

    def _gpus_of(self, share: Share | None) -> int:
        """How many a run uses: none where there are fewer than it has ranks."""
        return share.gpus if share and share.gpus <= len(self._machine.gpus) else 0
