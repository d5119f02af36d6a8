"""Those that ask to be let in, as the member sees them that they ask; it is the proposer.

A newcomer is a process in the place of one that is gone. What it does itself: `asking.py`.
"""

from __future__ import annotations

from typing import Any

from orchestrator.lifecycle.survival.links import Link, Peer


class Newcomers:
    """By their numbers: whose connection it is, and where it listens."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Link, Peer]] = {}

    def take(self, link: Link, message: dict[str, Any]) -> bool:
        """Let one wait that has proved who it is. Whether it asks for that."""
        try:
            peer = Peer.of(message["joins"])
        except (KeyError, ValueError):
            return False
        member = int(message["rank"])
        link.rank = member
        self._waiting[member] = link, peer
        return True

    def drop(self, link: Link) -> None:
        """It waits no longer, if it did."""
        for member in [m for m, (one, _) in self._waiting.items() if one is link]:
            del self._waiting[member]

    @property
    def links(self) -> list[Link]:
        return [link for link, _ in self._waiting.values()]

    @property
    def members(self) -> list[int]:
        return list(self._waiting)

    def peers_of(self, members: tuple[int, ...]) -> dict[str, list[float]]:
        """Where those of `members` listen that are newcomers, for the record."""
        found = self._waiting.items()
        return {str(m): peer.as_numbers() for m, (_, peer) in found if m in members}

    def let_in(self, members: tuple[int, ...]) -> dict[int, Link]:
        """The links of those that are members now; they wait no longer."""
        return {m: self._waiting.pop(m)[0] for m in list(self._waiting) if m in members}
