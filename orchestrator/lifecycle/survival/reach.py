"""Whether those that are missed have died, or are only beyond reach and about to go on alone."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.lifecycle.survival.agreement import Agreement
from orchestrator.lifecycle.survival.links import Peer, refuses

LOOK_S = 0.2


class Reach:
    """As one rank sees it.

    Args:
        peers: where ranks listen; it may grow.
    """

    def __init__(self, agreement: Agreement, peers: Mapping[int, Peer]) -> None:
        self._agreement, self._peers = agreement, peers
        self._judged = 0.0, False  # the loss, and what was found

    def outnumbered(self, noticed: float) -> bool:
        """See `Agreement`. Looked at once a loss, since each look may last.

        Args:
            noticed: when the latest loss was.
        """
        if self._judged[0] != noticed:
            gone = [self._peers[rank] for rank in self._agreement.gone]
            many = 2 * len(gone) > len(self._agreement.members)
            alive = sum(not refuses(peer, LOOK_S) for peer in gone) if many else 0
            self._judged = noticed, self._agreement.outnumbered(alive)
        return self._judged[1]
