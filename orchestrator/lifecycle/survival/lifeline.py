"""One rank's connections to the others, and the thread that hears who is gone.

All follow the first member of their generation (`agreement.py`); it hears of an end at once, since
the kernel closes what a killed process had open, and tells everybody what stands in the record. The
main thread is not needed for any of it: it may compute, or wait for what will never come.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.lifecycle.survival.agreement import Agreement, Generation, Members
from orchestrator.lifecycle.survival.connections import Connections
from orchestrator.lifecycle.survival.links import Link, Peer, connect, greeted, refuses
from orchestrator.lifecycle.survival.news import News
from orchestrator.lifecycle.survival.reach import LOOK_S, Reach
from orchestrator.lifecycle.survival.readiness import Readiness
from orchestrator.lifecycle.survival.record import GenerationRecord
from orchestrator.lifecycle.survival.silence import Borne, Silences
from orchestrator.lifecycle.survival.vouchers import Vouchers

BEAT_S = 1.0
SETTLE_S = 0.05
"""How long a proposer waits for further losses: what dies together should cost one generation."""
STOOD_STILL = 3.0  # beats; then this process itself stood still, and cannot judge others


class Lifeline:
    """One rank's. `start` it when all ranks listen; `end` it before the process ends.

    Args:
        agreement: this rank's view, from the first generation on.
        peers: where each rank listens.
        listener: this rank's own.
        secret: of this attempt.
        record: what counts.
        borne: after how long without a beat a rank is gone.
        up: of a newcomer, the link over which it was let in.
    """

    def __init__(
        self,
        agreement: Agreement,
        peers: Mapping[int, Peer],
        listener: socket.socket,
        *,
        secret: str,
        record: GenerationRecord,
        borne: Borne,
        up: Link | None = None,
    ) -> None:
        self._agreement, self._peers, self._secret = agreement, dict(peers), secret
        self._record, self._silence_s = record, borne.silence_s
        self._silences = Silences(self._peers, borne.silence_s)
        self._vouchers = Vouchers(agreement, self._peers, self._silences, secret, borne.vouched_s)
        self._reach = Reach(agreement, self._peers)
        self._of = Connections(listener, up)
        self._ready = Readiness()
        self._tried = self._noticed = 0.0  # since when the proposer does not answer; when lost
        self._probed = self._awake = 0.0  # when others were; since when this process can judge
        self._ended: str | None = None  # the word that this rank ends with
        self._news = News(Generation(agreement.generation, agreement.members, time.monotonic()))
        self._thread = threading.Thread(target=self._live, name="lifeline", daemon=True)

    def start(self) -> Lifeline:
        """Once the first member knows this rank, and will tell it of ends; or is too silent."""
        self._thread.start()
        with self._news.changed:
            self._news.changed.wait_for(self._followed, self._silence_s)
        return self

    def _followed(self) -> bool:
        up = self._of.up
        return self._agreement.proposer == self._agreement.me or (up is not None and up.answered)

    @property
    def latest(self) -> Generation:
        """The newest that this rank knows of. Raises `RuntimeError` where it will hear of none."""
        return self._news.latest

    @property
    def asked(self) -> bool:
        """Whether newcomers wait for this rank to let them in, and it can."""
        agreement = self._agreement
        if agreement.proposer != agreement.me or not agreement.missed(self._of.newcomers.members):
            return False
        return self._record.has_room()

    def ready(self, generation: int, updates: int) -> None:
        """This rank stands at a boundary of that generation, and waits for one with newcomers."""
        self._ready.stand(generation, updates)
        self._of.wake()

    def await_newer(self, than: int, timeout_s: float) -> Generation | None:
        """A generation after `than`; None when there will be none, or none came in time."""
        with self._news.changed:
            known = lambda: self.latest.number > than or self._agreement.left  # noqa: E731
            self._vouchers.wait(self._news.changed, known, timeout_s)
            return self._news.take(than)

    def on_news(self, interrupt: Callable[[], None]) -> None:
        """Call this, from the thread, when there is a newer generation: the main thread may wait
        for what will never come.
        """
        self._news.interrupt = interrupt

    def end(self, word: str) -> None:
        """This rank ends: `finished` in order, or `failed` of itself. The others are told."""
        if self._ended is not None:
            return
        self._ended = word
        self._of.wake()
        self._thread.join(timeout=2.0)

    def _live(self) -> None:
        """Nobody is to wait for a rank that hears nothing any more: not the others, nor itself."""
        try:
            self._run()
        except Exception as error:  # noqa: BLE001  # `latest` raises it in the main thread
            self._of.close_all()
            self._news.end(error)

    def _run(self) -> None:
        beat = looked = self._awake = time.monotonic()
        self._follow(looked)
        while self._ended is None:
            news = list(self._of.news(LOOK_S if not self._agreement.gone else SETTLE_S / 2))
            now = time.monotonic()
            if now - looked > STOOD_STILL * BEAT_S:
                self._of.forgive(now - looked)
                self._awake = now
            looked = now
            for link in news:
                self._heed(link)
            self._news.wake()
            if now - beat >= BEAT_S:
                beat = now
                self._of.say(**self._vouchers.beat)
            self._lose_silent(now)
            self._follow(now)
            self._probe(now)
            self._propose(now)
            self._grow()
            self._news.end_unheeded(self._awake, self._silence_s)
        self._of.say(ended=self._ended)

    def _heed(self, link: Link) -> None:
        if link.socket.fileno() < 0:  # closed because of what another one said
            return
        messages = link.receive()
        for message in messages or ():
            if not self._hear(link, message):
                return
        if messages is None:
            self._drop(link)

    def _hear(self, link: Link, message: dict[str, Any]) -> bool:
        """Take in one message. Whether the link is still open."""
        if link.rank is None:
            return self._greet(link, message)
        if "ended" in message:
            self._say_ended(str(message["ended"]), but=link)
        elif "waits" in message:
            self._vouchers.others_wait()
        elif message.get("ready") == self._agreement.generation:
            self._agreement.ready.add(link.rank)
        elif "generation" in message:
            self._accept(int(message["generation"]), tuple(message["members"]))
        return True

    def _greet(self, link: Link, message: dict[str, Any]) -> bool:
        rank = greeted(message, secret=self._secret, me=self._agreement.me)
        known = rank is None or rank in self._peers
        if not known and self._of.newcomers.take(link, message):
            self._of.strangers.discard(link)
            self._tell(link)
            return True
        if rank is None or rank not in self._agreement.members or rank in self._agreement.gone:
            self._of.close(link)  # nobody of ours, or one that was given up
            return False
        self._of.follow(link, rank)
        self._agreement.follow(rank)
        self._tell(link)
        return True

    def _tell(self, link: Link) -> None:
        """The newest generation, or only that somebody is there."""
        number, members = self.latest.number, self.latest.members
        link.send(**({"generation": number, "members": members} if number else {}))

    def _say_ended(self, word: str, but: Link | None = None) -> None:
        self._agreement.left = True
        self._news.wake()
        self._of.say(but=but, ended=word)

    def _drop(self, link: Link) -> None:
        """The other end is closed: who it was is gone, unless the others went on without us."""
        rank = link.rank
        self._of.close(link)
        if rank is not None:
            self._drop_unreached(rank)

    def _lose(self, rank: int) -> None:
        if not self._agreement.left and self._agreement.lose(rank):
            self._noticed = time.monotonic()
            self._tried = 0.0
            self._of.keep(set(self._of.followers) - {rank})

    def _lose_silent(self, now: float) -> None:
        for link in [*self._of.all(), *self._of.strangers]:
            if self._vouchers.no_word(link, now):
                if link.rank in self._peers:
                    self._silences.fell(link.rank)
                self._drop(link)

    def _follow(self, now: float) -> None:
        """See that this rank is connected to its proposer, where that is another."""
        proposer = self._agreement.proposer
        if self._of.up is not None and self._of.up.rank != proposer:
            self._of.close(self._of.up)
        if self._of.up is not None or proposer == self._agreement.me or self._agreement.fenced:
            return
        self._tried = self._tried or now
        try:
            me = self._agreement.me
            self._of.up = connect(self._peers[proposer], secret=self._secret, rank=me, to=proposer)
        except ConnectionRefusedError:  # its process is gone, and its port with it
            self._drop_unreached(proposer)
        except OSError:
            if time.monotonic() - self._tried > self._silences.answer_s(proposer):
                self._silences.fell(proposer)
                self._drop_unreached(proposer)
        else:
            self._tried = 0.0
            self._of.take(self._of.up)

    def _drop_unreached(self, rank: int) -> None:
        self._look_at_record()
        self._lose(rank)

    def _probe(self, now: float) -> None:
        """As the proposer: whoever has not come, at the start or since a loss, may be gone, too."""
        since, pause_s = max(self._noticed, self._awake), SETTLE_S if self._noticed else BEAT_S
        if now - max(since, self._probed) < pause_s:
            return
        self._probed = now
        for rank in self._agreement.awaited:
            silent = self._vouchers.not_come(rank, since, now)
            if refuses(self._peers[rank], LOOK_S) or silent:
                self._lose(rank)

    def _propose(self, now: float) -> None:
        members = self._agreement.proposal
        if members is None or now - self._noticed < SETTLE_S:
            return
        if self._vouchers.late(self._of.followers.values(), now):  # lost or heard of soon
            return
        if now - self._noticed < self._silence_s and self._reach.outnumbered(self._noticed):
            self._look_at_record()
        else:
            self._publish(members, gone=sorted(self._agreement.gone))

    def _grow(self) -> None:
        """Where this rank is ready: let others know; as the proposer, let newcomers in."""
        if not self._ready.tell(self._agreement, self._of.up):
            return
        if members := self._agreement.grown(self._of.newcomers.members):
            joined = self._of.newcomers.peers_of(members)
            self._publish(members, joined=joined, updates=self._ready.updates)

    def _publish(self, members: Members, **more: Any) -> None:
        """Where there is no room for it, it is tried again."""
        number = self._agreement.generation + 1
        found = self._record.proposed(number, members, **more, time=time.time())
        if found is not None:
            self._accept(found["generation"], tuple(found["members"]))

    def _look_at_record(self) -> None:
        while found := self._record.read(self._agreement.generation + 1):
            self._accept(found["generation"], tuple(found["members"]))

    def _accept(self, number: int, members: Members) -> None:
        if not self._agreement.accept(number, members):
            return
        noticed = self._noticed or time.monotonic()
        self._silences.over()
        if not self._peers.keys() >= set(members):
            self._peers |= self._record.peers()
        self._of.followers |= self._of.newcomers.let_in(members)
        self._agreement.following |= self._of.followers.keys() & set(members)
        self._of.keep(members)
        for link in self._of.followers.values():
            link.send(generation=number, members=members)
        self._ready.over()
        self._noticed = time.monotonic() if self._agreement.gone else 0.0
        self._news.tell(Generation(number, members, noticed))
