"""A newcomer's way in: it asks the first member, and waits until it is let in at a boundary.

Where that member dies, or is not the first any more, it asks the next one: who that is stands in
the record of generations. What the member does with it: `newcomers.py`.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.errors import Fenced
from orchestrator.lifecycle.survival.agreement import Generation
from orchestrator.lifecycle.survival.lifeline import BEAT_S
from orchestrator.lifecycle.survival.links import Link, Peer, connect
from orchestrator.lifecycle.survival.record import GenerationRecord

RETRY_S = 0.05
LOOK_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Asking:
    """One newcomer's.

    Attributes:
        me: its number among the members.
        peer: where it listens.
        silence_s: after how long without a word the member that it asks is not waited for.
        patience_s: for how long it tries where nobody answers.
        stopped: whether the run is to stop.
    """

    me: int
    peer: Peer
    record: GenerationRecord
    silence_s: float
    patience_s: float
    stopped: Callable[[], bool]

    def until_let_in(self) -> tuple[Generation, Link]:
        """The generation that it is in, and the link over which it heard so.

        Raises:
            Fenced: there is nobody to go on with any more.
        """
        print("note: this rank asks to be let in", flush=True)  # goes to the rank's log
        answered = time.monotonic()
        while time.monotonic() - answered < self.patience_s:
            link = self._asked()
            if link is None:
                self._look_for_stop()
                time.sleep(RETRY_S)  # until the others have agreed on who is left
                continue
            let_in = self._waited(link)
            if let_in is not None:
                return let_in, link
            link.close()
            answered = time.monotonic()
        raise Fenced(f"nobody that trains has answered for {self.patience_s:g} s")

    def _asked(self) -> Link | None:
        """The link to the first member; None where that does not answer."""
        first, newest = self.record.read(0), self.record.newest()
        leader = newest["members"][0] if newest else 0
        peer = self.record.peers().get(leader)
        if first is None or peer is None:
            return None
        numbers = self.peer.as_numbers()
        try:
            return connect(
                peer, secret=first["secret"], rank=self.me, to=leader, joins=numbers
            )  # fmt: skip
        except OSError:
            return None

    def _waited(self, link: Link) -> Generation | None:
        """None where another one is to be asked."""
        beat = 0.0
        while time.monotonic() - link.heard < self.silence_s:
            self._look_for_stop()
            if time.monotonic() - beat > BEAT_S:
                beat = time.monotonic()
                link.send()
            if not select.select([link.socket], [], [], LOOK_S)[0]:
                continue
            messages = link.receive()
            if messages is None:
                return None
            for message in messages:
                if "ended" in message:
                    raise Fenced("the run came to its end before this rank was let in")
                members = tuple(message.get("members", ()))
                if self.me in members:
                    return Generation(message["generation"], members, time.monotonic())
                if members and members[0] != link.rank:
                    return None
        return None

    def _look_for_stop(self) -> None:
        if self.stopped():
            raise Fenced("the run is to stop, and this rank was not let in yet")
