"""Laws of the agreement under crashes in any order: one list for each generation, and an end."""

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.lifecycle.survival.agreement import Agreement


class World:
    """Ranks that crash, and a record; what is sent arrives or dies with its sender."""

    def __init__(self, ranks):
        everyone = tuple(range(ranks))
        self.ranks = {r: Agreement(r, everyone) for r in everyone}
        self.record = {0: everyone}
        self.accepted = {}

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


def test_nobody_proposes_while_nobody_is_gone_or_somebody_has_ended_in_order():
    one = Agreement(0, (0, 1, 2))
    one.follow(1)
    one.follow(2)
    assert one.proposal is None
    one.lose(2)
    assert one.proposal == (0, 1)
    one.left = True
    assert one.proposal is None
