"""Which parameters had a gradient anywhere in a window: those that had none are left alone.

One process would leave the `.grad` of an unused parameter None, so that weight decay and momentum
do not touch it. To do the same, ranks have to agree, and two flags of the trailer nearly always
suffice: some rank used every parameter, or no rank's set changed since the sets were last
exchanged. Only when both fail is the exchange done, with one small all-reduce.
"""

from __future__ import annotations

import torch

from orchestrator.engine.common.boundary.packed_sums import USES_ALL, USES_CHANGED, Trailer
from orchestrator.engine.torch.comm.base_group import BaseGroup


class UsedParameters:
    """The sets of used parameters of one rank and, by agreement, of all.

    Args:
        count: how many parameters there are.
        group: the ranks.
    """

    def __init__(self, count: int, group: BaseGroup) -> None:
        self._group = group
        self.count = count
        self._mine = bytearray(count)
        self._all = bytes([1]) * count
        self._told: bytes | None = None
        self._unused_anywhere: list[int] = []
        self.exchanges = 0  # in this window

    def begin(self) -> None:
        """A window begins: none is used yet."""
        self.exchanges = 0
        self._mine[:] = bytes(len(self._mine))

    def mark(self, *parameters: int) -> None:
        """These had a gradient."""
        for parameter in parameters:
            self._mine[parameter] = 1

    def flag(self, trailer: Trailer) -> None:
        """Say in the trailer what the others have to know."""
        trailer.flags[USES_ALL] = int(bytes(self._mine) == self._all)
        trailer.flags[USES_CHANGED] = int(bytes(self._mine) != self._told)

    def unused(self, totals: Trailer) -> list[int]:
        """Numbers of the parameters that no rank used. Collective; silent unless sets changed."""
        if totals.flags[USES_ALL]:
            return []
        if totals.flags[USES_CHANGED]:
            self._told = bytes(self._mine)
            counts = torch.tensor(list(self._mine), dtype=torch.int32, device=self._group.device)
            self._group.all_reduce_sum(counts)
            self.exchanges = int(self._group.size > 1)
            self._unused_anywhere = [n for n, count in enumerate(counts.tolist()) if not count]
        return self._unused_anywhere
