"""A rank that stands at a boundary and waits for newcomers to be let in: its proposer is told."""

from __future__ import annotations

from orchestrator.lifecycle.survival.agreement import Agreement
from orchestrator.lifecycle.survival.links import Link


class Readiness:
    """One rank's. `stand` is the main thread's, the rest the lifeline's.

    Attributes:
        updates: that were done when it came to stand there.
    """

    def __init__(self) -> None:
        self.updates, self._generation = 0, -1
        self._told: Link | None = None

    def stand(self, generation: int, updates: int) -> None:
        """It does now, in this generation."""
        self.updates, self._generation = updates, generation

    def tell(self, agreement: Agreement, up: Link | None) -> bool:
        """Whether it stands there; whom it follows hears of it, once."""
        if self._generation != agreement.generation:
            return False
        agreement.ready.add(agreement.me)
        if up is not None and self._told is not up:
            self._told = up
            up.send(ready=agreement.generation)
        return True

    def over(self) -> None:
        """There is a newer generation."""
        self._told = None
