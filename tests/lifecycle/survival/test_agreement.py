"""Laws of the agreement under crashes and with newcomers in any order: one list for each
generation, nobody in one that was left out of an earlier one, and an end.
"""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.lifecycle.survival.agreement import Agreement
from orchestrator.lifecycle.survival.members import member_of


class World:
    """Ranks that crash, and a record; what is sent arrives or dies with its sender."""

    def __init__(self, ranks):
        everyone = tuple(range(ranks))
        self.ranks = {r: Agreement(r, everyone) for r in everyone}
        self.record = {0: everyone}
        self.accepted = {}
        self.size, self.waiting, self.processes = ranks, set(), {}

    def accept(self, rank, generation):
        self.ranks[rank].accept(generation, self.record[generation])
        one = self.ranks[rank]
        assert self.accepted.setdefault(one.generation, one.members) == one.members

    def step(self, rank, reached):
        """One look of `rank`: who is gone, whom to follow, what to propose; of those that follow
        it, it reaches `reached` with the news before whatever comes next.
        """
        me = self.ranks.get(rank)
        if me is None or me.fenced:
            return
        while me.generation + 1 in self.record and me.proposer not in self.ranks:
            self.accept(rank, me.generation + 1)
        if me.proposer != rank:
            if me.proposer not in self.ranks:
                me.lose(me.proposer)
            elif not self.ranks[me.proposer].fenced:
                self.ranks[me.proposer].follow(rank)
                if self.ranks[me.proposer].generation > me.generation:
                    self.accept(rank, self.ranks[me.proposer].generation)
            return
        for other in (*me.following, *me.awaited):
            if other not in self.ranks:
                me.lose(other)
        if me.proposal is not None:
            self.record.setdefault(me.generation + 1, me.proposal)
            self.accept(rank, me.generation + 1)
            for other in reached & me.following & self.ranks.keys():
                self.accept(other, me.generation)

    def come(self, rank):
        """Another process of a rank that nobody is of any more asks to be let in."""
        if not any(one % self.size == rank for one in (*self.ranks, *self.waiting)):
            self.processes[rank] = self.processes.get(rank, 0) + 1
            self.waiting.add(member_of(rank, self.processes[rank], self.size))

    def boundary(self, reached):
        """The members in `reached` stand at one, and wait there for those that have come."""
        newest = max(self.record)
        at_work = {r for r, one in self.ranks.items() if one.generation == newest} - self.fenced
        for proposer in {self.ranks[r].proposer for r in at_work} & at_work:
            one = self.ranks[proposer]
            one.ready |= {other for other in at_work if other % self.size in reached}
            grown = one.grown(self.waiting)
            if grown is None:
                continue
            self.record.setdefault(newest + 1, grown)
            self.accept(proposer, newest + 1)
            for new in self.waiting & {*self.record[newest + 1]}:
                self.waiting.discard(new)
                members = self.record[newest + 1]
                self.ranks[new] = Agreement(new, members, self.size, newest + 1)

    @property
    def fenced(self):
        return {rank for rank, one in self.ranks.items() if one.fenced}

    def settle(self):
        for _ in range(6 * len(self.ranks)):
            for rank in list(self.ranks):
                self.step(rank, set(self.ranks))


steps = st.lists(
    st.tuples(
        st.sampled_from(["look", "look", "crash"]), st.integers(0, 5), st.sets(st.integers(0, 5))
    ),
    max_size=40,
)


@given(st.integers(2, 6), steps)
def test_whoever_dies_and_whenever_the_living_agree_on_exactly_the_living(ranks, steps):
    world = World(ranks)
    for act, rank, reached in steps:
        if act == "crash" and len(world.ranks) > 1:
            world.ranks.pop(rank, None)
        else:
            world.step(rank, reached)
    world.settle()
    assert {one.members for one in world.ranks.values()} == {tuple(world.ranks)}
    assert len({one.generation for one in world.ranks.values()}) == 1


@given(
    st.integers(2, 6), steps, st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=4)
)
def test_ranks_that_wrongly_think_each_other_gone_never_go_on_in_two_groups(ranks, steps, cuts):
    world = World(ranks)
    for (act, rank, reached), cut in zip(steps, [*cuts, *[None] * len(steps)], strict=False):
        if cut is not None and cut[0] in world.ranks:
            world.ranks[cut[0]].lose(cut[1])
        if act == "crash" and len(world.ranks) > 1:
            world.ranks.pop(rank, None)
        else:
            world.step(rank, reached)
    world.settle()
    newest = max(world.record)
    going_on = {r for r, one in world.ranks.items() if not one.fenced and one.generation == newest}
    assert going_on <= set(world.record[newest])
    for one in world.ranks.values():
        assert one.members == world.record[one.generation]


acts = st.lists(
    st.tuples(
        st.sampled_from(["look", "look", "boundary", "come", "crash"]),
        st.integers(0, 3),
        st.sets(st.integers(0, 3)),
    ),
    max_size=60,
)


@given(st.integers(2, 4), acts)
def test_newcomers_come_in_once_and_whoever_was_left_out_stays_out(size, acts):
    world = World(size)
    for act, rank, reached in acts:
        if act == "come":
            world.come(rank)
        elif act == "boundary":
            world.boundary(reached)
        else:
            alive = sorted(world.ranks)
            one = alive[rank % len(alive)]
            if act == "crash" and len(alive) > 1:
                world.ranks.pop(one)
            else:
                world.step(one, {other for other in alive if other % size in reached})
    world.settle()
    assert {frozenset(one.members) for one in world.ranks.values()} == {frozenset(world.ranks)}
    assert len({one.members for one in world.ranks.values()}) == 1
    for number in sorted(world.record)[1:]:
        old, new = world.record[number - 1], world.record[number]
        assert new[0] in old, "a newcomer leads"
        stayed = tuple(one for one in old if one in new)
        assert new[: len(stayed)] == stayed, "those who stay have another order"
    lists = [set(world.record[number]) for number in sorted(world.record)]
    for earlier, later in pairwise(lists):
        left_out = set().union(*lists[: lists.index(earlier) + 1]) - earlier
        assert not left_out & later
        assert len({one % size for one in later}) == len(later), "two processes of one rank"


def test_newcomers_wait_until_every_member_stands_at_the_boundary_and_nobody_is_gone():
    one = Agreement(0, (0, 1, 2), 4)
    one.ready |= {0, 1}
    assert one.grown([7]) is None
    one.ready.add(2)
    assert one.grown([7]) == (0, 1, 2, 7)
    assert one.grown([7, 11, 6]) == (0, 1, 2, 11)  # the latest of rank 3; rank 2 is there
    assert one.grown([15, 10, 11]) == (0, 1, 2, 15)
    one.lose(2)
    assert one.grown([7]) is None


def test_a_newcomer_comes_last_however_low_its_number():
    one = Agreement(5, (5, 7), 4, 8, ready={5, 7})
    assert one.grown([4, 6]) == (5, 7, 4, 6)
    assert Agreement(4, (5, 7, 4), 4).proposer == 5


def test_nobody_proposes_while_nobody_is_gone_or_somebody_has_ended_in_order():
    one = Agreement(0, (0, 1, 2))
    one.follow(1)
    one.follow(2)
    assert one.proposal is None
    one.lose(2)
    assert one.proposal == (0, 1)
    one.left = True
    assert one.proposal is None
