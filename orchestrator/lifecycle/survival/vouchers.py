"""What witnesses (`witness.py`) say of ranks that say nothing themselves, as one rank asks for it.

Each is asked in a thread of its own: where a node is gone nobody answers, which takes a while, and
must not keep the lifeline from hearing others.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from orchestrator.lifecycle.survival.agreement import Agreement
from orchestrator.lifecycle.survival.links import CONNECT_S, Link, Peer
from orchestrator.lifecycle.survival.members import rank_of
from orchestrator.lifecycle.survival.silence import Silences
from orchestrator.lifecycle.survival.witness import GONE, sign
from orchestrator.rundir.warnings import warn

LATE_S = 1.5  # one and a half beats; then a rank may be silent with another that is lost
PAUSE_S = 0.5
"""Between two questions about the same rank."""
MOST_ASKED = 256  # at once; the others in the next round
WORD_BYTES = 80
NOT_AT_WORK = f"TZ{GONE}"
"""Letters of a process that will say nothing more, unless somebody wakes it."""


class Vouchers:
    """One rank's.

    Args:
        agreement: whom it counts on.
        peers: where witnesses are asked; it may grow.
        secret: of the attempt.
        silences: for how long silence is borne.
        most_s: for so long a rank may be vouched for in one silence.
    """

    def __init__(
        self,
        agreement: Agreement,
        peers: Mapping[int, Peer],
        silences: Silences,
        secret: str,
        most_s: float,
    ) -> None:
        self._agreement, self._peers, self._secret = agreement, peers, secret
        self._silences, self._most_s = silences, most_s
        self._under_way: set[int] = set()
        self._asked: dict[int, float] = {}
        self._vouched: dict[int, float] = {}
        self._told: dict[int, float] = {}  # people were, in the silence since then
        self._until = self._others_until = 0.0

    def no_word(self, link: Link, now: float) -> bool:
        """Whether whose link it is, is not waited for any more. `now` is when what had come was
        read: this process may have stood still since.
        """
        bears_s = self._silences.word_s(answered=link.answered)
        return self._silent_s(link.rank, link.heard, bears_s, now) > bears_s

    def not_come(self, rank: int, noticed: float, now: float) -> bool:
        """The same of one that should have come since a loss was noticed."""
        bears_s = self._silences.come_s
        return self._silent_s(rank, noticed, bears_s, now) > bears_s

    def late(self, links: Iterable[Link], now: float) -> bool:
        """Whether one of these is silent, and will be lost or vouched for soon."""
        late = [link for link in links if now - link.heard > LATE_S]
        return any(self._silent_s(link.rank, link.heard, LATE_S, now) > LATE_S for link in late)

    def _silent_s(self, rank: int | None, heard: float, bears_s: float, now: float) -> float:
        """For how long neither `rank` nor its witness has said that it lives.

        Args:
            heard: when its own last word came.
            bears_s: how long silence is borne; nobody is asked before half of it.
        """
        if rank is None or rank not in self._peers or now - heard <= bears_s / 2:
            return now - heard
        self._ask(rank)
        since = max(heard, min(self._vouched.get(rank, 0.0), heard + self._most_s))
        if since > heard:
            self._until = now + self._silences.most_s
            self._tell(rank, heard, now - heard)
        return now - since

    def wait(self, news: threading.Condition, known: Callable[[], bool], timeout_s: float) -> None:
        """For news. The time does not run while a silent rank that lives is waited for, here or by
        others: it may be the one to propose.
        """
        until = time.monotonic() + timeout_s
        while not known():
            left = max(until, self._until, self._others_until) - time.monotonic()
            if left <= 0.0:
                return
            news.wait(left)

    def others_wait(self) -> None:
        """Somebody says that a silent rank is vouched for."""
        self._others_until = time.monotonic() + self._silences.most_s

    @property
    def beat(self) -> dict[str, Any]:
        """What this rank's next beat says of it, by its own knowledge."""
        return {"waits": True} if time.monotonic() < self._until else {}

    def _tell(self, rank: int, heard: float, silent_s: float) -> None:
        """People hear once that it is waited for, from one of those who wait."""
        others = (one for one in self._agreement.members if one != rank)
        told = heard == self._told.get(rank) or silent_s <= self._silences.most_s
        if told or self._agreement.me != min(others):
            return
        self._told[rank] = heard
        warn(
            f"rank {rank_of(rank, self._agreement.ranks)} has said nothing for {silent_s:.0f} s, "
            f"but its process lives, perhaps in code that holds Python's interpreter; the others "
            f"wait for it",
            kind="silent rank that lives",
        )

    def _ask(self, rank: int) -> None:
        now = time.monotonic()
        if rank in self._under_way or now - self._asked.get(rank, 0.0) < PAUSE_S:
            return
        if not self._peers[rank].witness or len(self._under_way) >= MOST_ASKED:
            return
        self._asked[rank] = now
        self._under_way.add(rank)
        threading.Thread(target=self._hear, args=(rank,), name="asking", daemon=True).start()

    def _hear(self, rank: int) -> None:
        began = time.monotonic()
        try:
            letter = letter_told(self._peers[rank], rank, self._secret)
        except OSError:  # its node is gone, or its witness
            letter = GONE
        if letter not in NOT_AT_WORK:
            self._vouched[rank] = began
        self._under_way.discard(rank)


def letter_told(peer: Peer, member: int, secret: str) -> str:
    """The kernel's letter for the state of a member's process, by its witness.

    Raises:
        OSError: nobody answers, or somebody else does.
    """
    number = secrets.token_hex(16)
    with socket.create_connection((peer.address, peer.witness), timeout=CONNECT_S) as link:
        link.sendall(f"{number}\n".encode())
        said, until = b"", time.monotonic() + CONNECT_S
        while not said.endswith(b"\n"):
            link.settimeout(max(0.01, until - time.monotonic()))
            content = link.recv(WORD_BYTES)
            said += content
            if not content or len(said) > WORD_BYTES:
                raise ConnectionAbortedError
    letter, _, signed = said.decode("ascii", "replace").strip().partition(" ")
    ours = sign(secret, member, number, letter)
    if not hmac.compare_digest(signed.encode(), ours.encode()):
        raise ConnectionAbortedError
    return letter
