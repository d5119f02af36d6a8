"""How a rank goes on when others are gone or have come, in a group of those that are there.

What happens, and why no number changes: docs/explanation/surviving.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.config.schema import ClusterConfig, node_range
from orchestrator.engine.api import Framework, GroupSpec, Survives
from orchestrator.engine.common.waiting import for_others
from orchestrator.errors import (
    Fenced,
    NoWayOn,
    PeerLost,
    RendezvousError,
    StateLost,
    StopRequested,
)
from orchestrator.lifecycle.survival.agreement import Generation, Members
from orchestrator.lifecycle.survival.lifeline import Lifeline
from orchestrator.lifecycle.survival.members import rank_of
from orchestrator.lifecycle.survival.membership import Membership
from orchestrator.lifecycle.survival.record import GenerationRecord
from orchestrator.rank.loop import Attended, Outcome
from orchestrator.rank.restoring import GOES_BACK
from orchestrator.rank.surviving import standing
from orchestrator.rank.surviving.next_group import formed
from orchestrator.rank.surviving.words import ranks, those_left, went_away
from orchestrator.rank.watched_recorder import Watched
from orchestrator.rank.writing.survival_notes import Notes, notes_of
from orchestrator.rundir.warnings import warn

SILENCE_S = 5.0
"""After which a rank that says nothing is gone, where cluster.heartbeat_timeout_s is not less."""
MARGIN_S = 3.0
MOST_TRIES = 3
"""So many groups may begin one update; what kills a fourth is in the update."""


def silence_s(cluster: ClusterConfig) -> float:
    """For how long a rank may be silent where the others would go on without it."""
    return min(cluster.heartbeat_timeout_s, SILENCE_S)


def least_nodes(cluster: ClusterConfig) -> int:
    """How many nodes have to be left: the range's least; one where a number was asked for."""
    return 1 if isinstance(cluster.nodes, int) else node_range(cluster.nodes)[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one rank has its part with, among those that survive.

    Attributes:
        me: its number (`lifecycle/survival/members.py`).
        spec: that of the attempt's first group; `spec.size` ranks are what all began with.
        nodes: the number of each rank's node.
        least_nodes: so many have to be left.
    """

    me: int
    spec: GroupSpec
    framework: Framework
    engine: Survives
    nodes: Mapping[int, int]
    least_nodes: int
    silence_s: float


class Survivors:
    """One rank's part among them. `entering.py` makes it.

    Args:
        lifeline: begun.
        record: of this attempt's generations.
        members: of the group that this rank is in; of a newcomer, those who let it in.
        generation: that group's number.
    """

    def __init__(
        self,
        part: Part,
        lifeline: Lifeline | Membership,
        record: GenerationRecord,
        *,
        members: Members,
        generation: int = 0,
    ) -> None:
        self._part, self._lifeline, self._record = part, lifeline, record
        self._engine, self._silence_s = part.engine, part.silence_s
        self._generation, self._members = generation, members
        self._history: list[Notes] = []
        self._tries = (-1, 0)
        self.place = part.spec.rank, part.spec.size
        self.back: Callable[[int], int | None] = lambda _: None
        self.over: Callable[[], bool] = lambda: False

    def end(self, word: str) -> None:
        """This rank ends: the others are not to go on without it."""
        self._lifeline.end(word)

    def watched(self, inner: Attended) -> Attended:
        """`inner`, left in mid-window when somebody is gone; a rank that was given up writes
        nothing through it.
        """
        return Watched(inner, self)

    def check(self) -> None:
        """Raises `PeerLost` when there is a newer generation."""
        if self._lifeline.latest.number > self._generation:
            raise PeerLost("another rank is gone")

    def check_record(self) -> None:
        """`check` by the record itself: the thread may have stood still with this rank."""
        if self._record.read(self._generation + 1) is not None:
            raise PeerLost("another rank is gone")

    def tell_newcomers(self) -> None:
        """At the boundary to come all ranks hear of newcomers, where this one knows of some."""
        self._engine.newcomers_wait(self._lifeline.asked)

    # ------------------------------------------------------------------ the next generation

    def enter(self, outcome: Outcome) -> list[Notes]:
        """As a newcomer that was let in, `go_on` to where the others stand."""
        return self.go_on(PeerLost("this rank takes its place again"), outcome)

    def grow(self, outcome: Outcome) -> list[Notes]:
        """After a boundary at which all heard of newcomers: go on with them. Collective; else as
        `go_on`.
        """
        self._engine.before_growth()
        self._lifeline.ready(self._generation, outcome.updates)
        with for_others("newcomers to be let in"):
            self._lifeline.await_newer(self._generation, self._part.spec.collective_timeout_s)
        return self.go_on(PeerLost("newcomers are let in"), outcome)

    def go_on(self, error: PeerLost, outcome: Outcome) -> list[Notes]:
        """Meet the others that are left, and stand where they do. Collective among these.

        Args:
            error: how this rank noticed.
            outcome: where this rank stands; it is brought up to where the others do.

        Returns:
            What is to be recorded, of this change and of those before it.

        Raises:
            Fenced: the others have gone on without this rank.
            NoWayOn: too many losses came in one update, or a part of the state is lost.
            PeerLost: nobody is known to be gone.
        """
        print(f"note: {error}", flush=True)  # goes to the rank's log
        noticed = 0.0
        with for_others("the next group to form"):
            while True:
                newer = self._next(error)
                noticed = noticed or newer.noticed
                try:
                    lost = self._join(newer, outcome)
                except NoWayOn:
                    raise
                except (PeerLost, RendezvousError, StopRequested) as again:
                    error = again if isinstance(again, PeerLost) else PeerLost(str(again))
                    print(f"note: {error}", flush=True)  # goes to the rank's log
                else:
                    return self._told(newer, outcome, time.monotonic() - noticed, lost)

    def _next(self, error: PeerLost) -> Generation:
        """The next generation. Raises as `go_on` does, once it is known that there is none."""
        newer = self._lifeline.await_newer(self._generation, self._silence_s + MARGIN_S)
        if newer is None:
            raise self._record.no_room or error
        self._generation = newer.number
        if self._part.me not in newer.members:
            raise Fenced(
                f"rank {self._part.spec.rank} was silent for {self._silence_s:g} s, and the others "
                f"have gone on without it (generation {newer.number})"
            ) from error
        return newer

    def _join(self, newer: Generation, outcome: Outcome) -> int | None:
        """Be in the group. How many updates a lost part of the state takes back; None: no part."""
        members = newer.members
        rank = members.index(self._part.me)
        group = self._formed(newer, rank)
        self._lifeline.on_news(group.interrupt)
        if self._lifeline.latest.number > newer.number:  # while nobody was there to be interrupted
            raise PeerLost("one more rank is gone")
        self.place = rank, len(members)
        try:
            told = self._engine.catch_up(group, outcome.updates, standing.told(outcome))
        except StateLost as lost:
            self._engine.regroup(group)
            if (taken_back := self.back(rank)) is None:
                raise self._no_way_on(f"{lost}, and there is no checkpoint yet") from lost
            return taken_back
        if told is not None:
            standing.take(outcome, told)
        self._engine.regroup(group)
        return None

    def _formed(self, newer: Generation, rank: int) -> Any:
        node = self._node_of(self._part.me)
        beside = [one for one in newer.members if self._node_of(one) == node]

        def given_up() -> bool:
            return self._lifeline.latest.number > newer.number

        spec = replace(
            self._part.spec,
            rank=rank,
            size=len(newer.members),
            generation=newer.number,
            reads=beside[0] == self._part.me,
            stop_requested=given_up,
        )
        return formed(self._part.framework, spec, given_up)

    def _told(
        self, newer: Generation, outcome: Outcome, seconds: float, lost: int | None
    ) -> list[Notes]:
        """The notes of all changes; raises `NoWayOn` where losses in this update are too many."""
        gone, came = self._change_to(newer.members)
        update, count = outcome.updates + 1 + (lost or 0), len(newer.members)
        facts = {
            "generation": newer.number, "ranks": count, "nodes": len(self._nodes),
            "seconds": round(seconds, 3),
        }  # fmt: skip
        over = lost is None and self.over()
        self._history.append(notes_of(gone, came, facts, lost, redone=not over))
        if came:
            self._say(f"{ranks(came)} came back; {count} ranks go on with update {update}")
        if gone:
            self._count_try(outcome.updates, ranks(gone))
            sentence = went_away(gone, update, over=over)
            if lost is not None:
                sentence += GOES_BACK.format(outcome.updates)
            self._say(sentence + (self._few() or those_left(count, over=over)))
        print(f"note: generation {newer.number} after {seconds:.2f} s", flush=True)
        return list(self._history)

    def _change_to(self, members: Members) -> tuple[list[int], list[int]]:
        """The ranks that are not in it any more, and those that have come."""
        old, new = set(self._members), set(members)
        self._members = members
        return self._ranks_of(old - new), self._ranks_of(new - old)

    def _ranks_of(self, members: set[int]) -> list[int]:
        return sorted(rank_of(one, self._part.spec.size) for one in members)

    def _count_try(self, updates: int, who: str) -> None:
        self._tries = (updates, 1 + self._tries[1] * (self._tries[0] == updates))
        if self._tries[1] > MOST_TRIES:
            raise self._no_way_on(
                f"{self._tries[1]} groups began update {updates + 1}, and each lost ranks in it, "
                f"at last {who}: what comes back so often is not survived"
            )

    def _say(self, sentence: str) -> None:
        """The first one says it to all who look; each in its log."""
        if self._members[0] == self._part.me:
            warn(sentence)
        print(f"note: {sentence}", flush=True)

    @property
    def nodes_gone(self) -> set[int]:
        """The nodes of which nobody is left."""
        return set(self._part.nodes.values()) - self._nodes

    @property
    def _nodes(self) -> set[int]:
        return {self._node_of(member) for member in self._members}

    def _node_of(self, member: int) -> int:
        return self._part.nodes[rank_of(member, self._part.spec.size)]

    def _no_way_on(self, why: str) -> NoWayOn:
        return NoWayOn(why, sorted(self.nodes_gone))

    def too_few(self) -> NoWayOn | None:
        """Why those that are left must not go on; None where they may."""
        words = self._few()
        return self._no_way_on(words) if words else None

    def _few(self) -> str:
        count, least = len(self._nodes), self._part.least_nodes
        if count >= least:
            return ""
        nodes = "1 node is" if count == 1 else f"{count} nodes are"
        return f"{nodes} left, fewer than cluster.nodes.min={least}, so the run does not go on"
