"""Who is left: what one rank knows, and when it may propose. Pure: no sockets, no clocks, no files.

Everybody follows the first member that it does not know to be gone, its *proposer*. A proposer
proposes once all members follow it, or are gone. What was proposed counts only once it stands in
the generation's record, which exactly one proposal gets into (`record.py`), so any number of
proposers does no harm.

Newcomers ask to be let in; only the proposer's word counts there, too. It takes them into the next
generation at a boundary, once every member stands there and waits for it, and nobody is gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestrator.lifecycle.survival.members import rank_of

Members = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """What was agreed. `noticed`: when this rank knew that somebody is gone, monotonic."""

    number: int
    members: Members
    noticed: float


@dataclass(slots=True)
class Agreement:
    """One rank's view of a generation.

    Whom it speaks of as ranks are members (`members.py`): processes, each with a number of its own.

    Attributes:
        me: this rank.
        members: of this generation, in order.
        ranks: how many there were at the start of the attempt; 0: as many as `members`.
        generation: its number.
        gone: members that ended without a word, or fell silent.
        following: members that have told this rank that they follow it.
        ready: members that stand at a boundary, and wait for newcomers to be let in.
        left: some member has ended in order, or failed of itself: there is nothing to go on with.
    """

    me: int
    members: Members
    ranks: int = 0
    generation: int = 0
    gone: set[int] = field(default_factory=set[int])
    following: set[int] = field(default_factory=set[int])
    ready: set[int] = field(default_factory=set[int])
    left: bool = False

    def __post_init__(self) -> None:
        self.ranks = self.ranks or len(self.members)

    @property
    def fenced(self) -> bool:
        """The others have gone on without this rank."""
        return self.me not in self.members

    @property
    def proposer(self) -> int:
        """Whom this rank follows; itself, where all before it are gone."""
        return next((rank for rank in self.members if rank not in self.gone), self.me)

    @property
    def awaited(self) -> Members:
        """As the proposer: members of whom it is not known yet whether they are left."""
        if self.fenced or self.proposer != self.me:
            return ()
        known = self.gone | self.following | {self.me}
        return tuple(rank for rank in self.members if rank not in known)

    def lose(self, rank: int) -> bool:
        """`rank` is gone. Whether that was news."""
        if rank not in self.members or rank in self.gone or rank == self.me:
            return False
        self.gone.add(rank)
        self.following.discard(rank)
        return True

    def follow(self, rank: int) -> None:
        """`rank` says that it follows this one. One that is gone stays gone."""
        if rank in self.members and rank not in self.gone:
            self.following.add(rank)

    @property
    def proposal(self) -> Members | None:
        """Who should be in the next generation; None while that is not to be said."""
        if self.left or self.fenced or not self.gone or self.proposer != self.me or self.awaited:
            return None
        return tuple(rank for rank in self.members if rank not in self.gone)

    def missed(self, newcomers: Iterable[int]) -> list[int]:
        """Those that may come in: of a rank's processes the latest, and none beside a member."""
        latest = {rank_of(one, self.ranks): one for one in sorted(newcomers)}
        taken = {rank_of(one, self.ranks) for one in self.members}
        return sorted(one for rank, one in latest.items() if rank not in taken)

    def grown(self, newcomers: Iterable[int]) -> Members | None:
        """Who should be in the next generation, the members and behind them those of `newcomers`
        that may come in; None while some member is not ready.
        """
        wait = self.left or self.fenced or self.gone or self.proposer != self.me
        if wait or not self.ready.issuperset(self.members):
            return None
        return *self.members, *self.missed(newcomers)

    def outnumbered(self, beyond_reach: int) -> bool:
        """Whether the others may be about to go on without this side: more of them are only beyond
        reach, and not known to have died, than it has itself.
        """
        return beyond_reach > len(self.proposal or ())

    def accept(self, generation: int, members: Iterable[int]) -> bool:
        """What stands in a record. Whether it is newer than what was known."""
        if generation <= self.generation:
            return False
        self.generation, self.members = generation, tuple(members)
        self.gone &= set(self.members)
        self.following &= set(self.members)
        self.ready.clear()
        return True
