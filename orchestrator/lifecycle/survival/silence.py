"""For how long silence is borne: what falls silent falls silent together, a node or all behind one
switch, and should cost the wait for one.

The first that falls silent has all of the time that there is. Whoever is asked after that only has
to answer: its kernel within a moment, itself soon after. What hears nobody any more because it is
cut off itself does not go on for that: the others are more than it (`Agreement.outnumbered`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.lifecycle.survival.links import CONNECT_S, Peer

ANSWER_S = 1.0
"""Within which a rank that lives answers, where others have just fallen silent."""
COME_S = 2.0  # the others see the first silence up to a beat later, and then ask as this rank did


@dataclass(frozen=True, slots=True)
class Borne:
    """For how long a rank that says nothing is waited for; and one that its witness vouches for."""

    silence_s: float
    vouched_s: float = 0.0


class Silences:
    """What one rank knows of them since the generation began.

    Attributes:
        most_s: no silence is borne for longer.
    """

    def __init__(self, peers: Mapping[int, Peer], silence_s: float) -> None:
        self._peers, self.most_s = peers, silence_s
        self._fell: set[int] = set()

    def fell(self, rank: int) -> None:
        self._fell.add(rank)

    def over(self) -> None:
        """Those that fell silent are left behind."""
        self._fell.clear()

    def beside(self, rank: int) -> bool:
        """Whether another rank of its node has fallen silent."""
        node = self._peers[rank].node
        return any(self._peers[one].node == node for one in self._fell - {rank})

    def word_s(self, *, answered: bool) -> float:
        """Within which the next word of a rank must come. `answered`: one has come."""
        return self.most_s if answered or not self._fell else self._soon(ANSWER_S)

    def answer_s(self, rank: int) -> float:
        """For how long its kernel may not answer."""
        if self.beside(rank):
            return 0.0
        return self.most_s if not self._fell else self._soon(2 * CONNECT_S)

    @property
    def come_s(self) -> float:
        """Within which those that are left must come to the one that proposes."""
        asked = len(self._fell) * ANSWER_S
        return self.most_s if not self._fell else self._soon(COME_S + asked)

    def _soon(self, seconds: float) -> float:
        return min(seconds, self.most_s)
