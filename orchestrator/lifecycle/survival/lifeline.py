"""One rank's connections to the others, and the thread that hears who is gone.

All follow the lowest rank of their generation (`agreement.py`); it hears of an end at once, since
the kernel closes what a killed process had open, and tells everybody what stands in the record. The
main thread is not needed for any of it: it may compute, or wait for what will never come.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.lifecycle.survival.agreement import Agreement, Generation, Members
from orchestrator.lifecycle.survival.links import Link, Peer, connect, greeted, refuses
from orchestrator.lifecycle.survival.record import GenerationRecord
from orchestrator.lifecycle.survival.silence import Silences

BEAT_S = 1.0
LOOK_S = 0.2
SETTLE_S = 0.05
"""How long a proposer waits for further losses: what dies together should cost one generation."""
STOOD_STILL = 3.0  # beats; then this process itself stood still, and cannot judge others
LATE = 1.5  # beats; then a rank may be silent with another, and both should cost one generation


class Lifeline:
    """One rank's. `start` it when all ranks listen; `end` it before the process ends.

    Args:
        agreement: this rank's view, from the first generation on.
        peers: where each rank listens.
        listener: this rank's own.
        secret: of this attempt.
        record: what counts.
        silence_s: after how long without a beat a rank is gone.
    """

    def __init__(
        self,
        agreement: Agreement,
        peers: Mapping[int, Peer],
        listener: socket.socket,
        *,
        secret: str,
        record: GenerationRecord,
        silence_s: float,
    ) -> None:
        self._agreement, self._peers, self._secret = agreement, peers, secret
        self._listener, self._record, self._silence_s = listener, record, silence_s
        self._silences = Silences(peers, silence_s)
        self._links: dict[int, Link] = {}  # of those that follow this rank
        self._strangers: set[Link] = set()
        self._up: Link | None = None  # to whom this rank follows
        self._tried = self._noticed = 0.0  # since when the proposer does not answer; when lost
        self._probed, self._judged = 0.0, (0.0, False)
        self._ended: str | None = None  # the word that this rank ends with
        self._news = threading.Condition()
        self._latest = Generation(agreement.generation, agreement.members, 0.0)
        self._interrupt: Callable[[], None] = lambda: None
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._run, name="lifeline", daemon=True)

    # ------------------------------------------------------------------ the main thread's side

    def start(self) -> Lifeline:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread.start()
        return self

    @property
    def latest(self) -> Generation:
        """The newest that this rank knows of."""
        return self._latest

    @property
    def hopeless(self) -> bool:
        """Some rank failed of itself, or has ended in order: there will be no next generation."""
        return self._agreement.left

    def await_newer(self, than: int, timeout_s: float) -> Generation | None:
        """A generation after `than`; None when there will be none, or none came in time."""
        with self._news:
            self._news.wait_for(lambda: self._latest.number > than or self.hopeless, timeout_s)
            return self._latest if self._latest.number > than else None

    def on_news(self, interrupt: Callable[[], None]) -> None:
        """Call this, from the thread, when there is a newer generation: the main thread may wait
        for what will never come.
        """
        self._interrupt = interrupt

    def end(self, word: str) -> None:
        """This rank ends: `finished` in order, or `failed` of itself. The others are told."""
        if self._ended is not None:
            return
        self._ended = word
        os.write(self._woken, b"x")
        self._thread.join(timeout=2.0)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        beat = looked = time.monotonic()
        while self._ended is None:
            ready = self._selector.select(LOOK_S if not self._agreement.gone else SETTLE_S / 2)
            now = time.monotonic()
            if now - looked > STOOD_STILL * BEAT_S:
                self._forgive(now - looked)
            looked = now
            for key, _ in ready:
                self._heed(key.fileobj, key.data)
            if now - beat >= BEAT_S:
                beat = now
                for link in self._all():
                    link.send()
            self._lose_silent(now)
            self._follow(now)
            self._probe(now)
            self._propose(now)
        for link in self._all():
            link.send(ended=self._ended)

    def _all(self) -> list[Link]:
        return [*self._links.values(), *([self._up] if self._up else [])]

    def _forgive(self, seconds: float) -> None:
        for link in self._all():
            link.heard += seconds

    def _heed(self, source: Any, link: Link | None) -> None:
        if source is self._listener:
            accepted, _ = self._listener.accept()
            self._take(Link(accepted))
        elif link is not None:
            messages = link.receive()
            for message in messages or ():
                if not self._hear(link, message):
                    return
            if messages is None:
                self._drop(link)

    def _take(self, link: Link) -> None:
        self._selector.register(link.socket, selectors.EVENT_READ, link)
        if link.rank is None:
            self._strangers.add(link)

    def _close(self, link: Link) -> None:
        self._selector.unregister(link.socket)
        link.close()
        self._strangers.discard(link)
        if link is self._up:
            self._up = None
        elif link.rank is not None and self._links.get(link.rank) is link:
            del self._links[link.rank]

    def _hear(self, link: Link, message: dict[str, Any]) -> bool:
        """Take in one message. Whether the link is still open."""
        if link.rank is None:
            return self._greet(link, message)
        if "ended" in message:
            self._say_ended(str(message["ended"]), but=link)
        elif "generation" in message:
            self._accept(int(message["generation"]), tuple(message["members"]))
        return True

    def _greet(self, link: Link, message: dict[str, Any]) -> bool:
        rank = greeted(message, secret=self._secret, me=self._agreement.me)
        if rank is None or rank not in self._agreement.members or rank in self._agreement.gone:
            self._close(link)  # nobody of ours, or one that was given up
            return False
        link.rank = rank
        self._strangers.discard(link)
        if rank in self._links:
            self._close(self._links[rank])
        self._links[rank] = link
        self._agreement.follow(rank)
        self._tell(link)
        return True

    def _tell(self, link: Link) -> None:
        """The newest generation, or only that somebody is there."""
        number, members = self._latest.number, self._latest.members
        link.send(**({"generation": number, "members": members} if number else {}))

    def _say_ended(self, word: str, but: Link | None = None) -> None:
        with self._news:
            self._agreement.left = True
            self._news.notify_all()
        for link in self._all():
            if link is not but:
                link.send(ended=word)

    def _drop(self, link: Link) -> None:
        """The other end is closed: who it was is gone, unless the others went on without us."""
        rank = link.rank
        self._close(link)
        if rank is not None:
            self._drop_unreached(rank)

    def _lose(self, rank: int) -> None:
        if not self._agreement.left and self._agreement.lose(rank):
            self._noticed = time.monotonic()
            self._tried = 0.0
            if rank in self._links:
                self._close(self._links[rank])

    def _lose_silent(self, now: float) -> None:
        for link in [*self._all(), *self._strangers]:
            if now - link.heard > self._silences.word_s(answered=link.answered):
                if link.rank is not None:
                    self._silences.fell(link.rank)
                self._drop(link)

    def _follow(self, now: float) -> None:
        """See that this rank is connected to its proposer, where that is another."""
        proposer = self._agreement.proposer
        if self._up is not None and self._up.rank != proposer:
            self._close(self._up)
        if self._up is not None or proposer == self._agreement.me or self._agreement.fenced:
            return
        self._tried = self._tried or now
        try:
            me = self._agreement.me
            self._up = connect(self._peers[proposer], secret=self._secret, rank=me, to=proposer)
        except ConnectionRefusedError:  # its process is gone, and its port with it
            self._drop_unreached(proposer)
        except OSError:
            if time.monotonic() - self._tried > self._silences.answer_s(proposer):
                self._silences.fell(proposer)
                self._drop_unreached(proposer)
        else:
            self._tried = 0.0
            self._take(self._up)

    def _drop_unreached(self, rank: int) -> None:
        self._look_at_record()
        self._lose(rank)

    def _probe(self, now: float) -> None:
        """As the proposer: whoever has not come, though somebody is gone, may be gone as well."""
        if not self._agreement.gone or now - max(self._noticed, self._probed) < SETTLE_S:
            return
        self._probed = now
        for rank in self._agreement.awaited:
            silent = now - self._noticed > self._silences.come_s
            if refuses(self._peers[rank], LOOK_S) or silent:
                self._lose(rank)

    def _propose(self, now: float) -> None:
        members = self._agreement.proposal
        late = any(now - link.heard > LATE * BEAT_S for link in self._links.values())
        if members is None or now - self._noticed < SETTLE_S or late:  # lost or heard of soon
            return
        if now - self._noticed < self._silence_s and self._outnumbered():
            self._look_at_record()
            return
        found = self._record.publish(
            self._agreement.generation + 1, members,
            gone=sorted(self._agreement.gone), time=time.time(),
        )  # fmt: skip
        self._accept(found["generation"], tuple(found["members"]))

    def _outnumbered(self) -> bool:
        """Looked at once a loss, since each look may last."""
        if self._judged[0] != self._noticed:
            gone = [self._peers[rank] for rank in self._agreement.gone]
            many = 2 * len(gone) > len(self._agreement.members)
            alive = sum(not refuses(peer, LOOK_S) for peer in gone) if many else 0
            self._judged = (self._noticed, self._agreement.outnumbered(alive))
        return self._judged[1]

    def _look_at_record(self) -> None:
        while found := self._record.read(self._agreement.generation + 1):
            self._accept(found["generation"], tuple(found["members"]))

    def _accept(self, number: int, members: Members) -> None:
        if not self._agreement.accept(number, members):
            return
        noticed = self._noticed or time.monotonic()
        self._silences.over()
        for link in [one for rank, one in self._links.items() if rank not in members]:
            self._close(link)
        for link in self._links.values():
            link.send(generation=number, members=members)
        with self._news:
            self._latest = Generation(number, members, noticed)
            self._noticed = time.monotonic() if self._agreement.gone else 0.0
            self._news.notify_all()
        self._interrupt()
