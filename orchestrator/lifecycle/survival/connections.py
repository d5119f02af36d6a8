"""All sockets of one rank's lifeline: who follows it, whom it follows, who has just come."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Container, Iterator
from typing import Any

from orchestrator.lifecycle.survival.links import Link
from orchestrator.lifecycle.survival.newcomers import Newcomers

MOST_STRANGERS = 64


class Connections:
    """One rank's. Used by one thread, but for `wake`.

    Args:
        listener: where others connect.
        up: to whom this rank follows, where it does already.

    Attributes:
        followers: by their numbers; strangers: that have not said who they are.
    """

    def __init__(self, listener: socket.socket, up: Link | None) -> None:
        self._listener, self.up = listener, up
        self.followers: dict[int, Link] = {}
        self.strangers: set[Link] = set()
        self.newcomers = Newcomers()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = os.pipe()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        if up is not None:
            self._selector.register(up.socket, selectors.EVENT_READ, up)

    def wake(self) -> None:
        """Let `news` return. For other threads."""
        os.write(self._woken, b"x")

    def news(self, timeout_s: float) -> Iterator[Link]:
        """The links that there is something to read from; new ones are taken in meanwhile."""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._take_new()
            elif key.fileobj == self._wake:
                os.read(self._wake, 64)
            else:
                yield key.data

    def _take_new(self) -> None:
        """One that connects. A rank says at once who it is, so what has said nothing for longest
        is none, and leaves where there are too many or no descriptor is left.
        """
        try:
            new = Link(self._listener.accept()[0])
        except OSError:  # it has gone already; or this process can open nothing more
            new = None
        if self.strangers and (new is None or len(self.strangers) >= MOST_STRANGERS):
            self.close(min(self.strangers, key=lambda link: link.heard))
        if new is not None:
            self.take(new)

    def all(self) -> list[Link]:
        """Those whose other end has said who it is."""
        return [
            *self.followers.values(), *self.newcomers.links, *([self.up] if self.up else []),
        ]  # fmt: skip

    def take(self, link: Link) -> None:
        self._selector.register(link.socket, selectors.EVENT_READ, link)
        if link.rank is None:
            self.strangers.add(link)

    def follow(self, link: Link, rank: int) -> None:
        """A stranger follows this rank. A link that it had before is closed."""
        link.rank = rank
        self.strangers.discard(link)
        if rank in self.followers:
            self.close(self.followers[rank])
        self.followers[rank] = link

    def close(self, link: Link) -> None:
        self._selector.unregister(link.socket)
        link.close()
        self.strangers.discard(link)
        self.newcomers.drop(link)
        if link is self.up:
            self.up = None
        elif link.rank is not None and self.followers.get(link.rank) is link:
            del self.followers[link.rank]

    def say(self, but: Link | None = None, **message: Any) -> None:
        """To all of these, or all but one; nothing but a sign of life without a message."""
        for link in self.all():
            if link is not but:
                link.send(**message)

    def keep(self, ranks: Container[int]) -> None:
        """Close the links of all followers but these."""
        for link in [one for rank, one in self.followers.items() if rank not in ranks]:
            self.close(link)

    def close_all(self) -> None:
        """Also where others connect: nobody takes this rank for one that listens."""
        for link in [*self.all(), *self.strangers]:
            self.close(link)
        self._listener.close()

    def forgive(self, seconds: float) -> None:
        """This process stood still for so long, and cannot have heard anybody."""
        for link in [*self.all(), *self.strangers]:
            link.heard += seconds
