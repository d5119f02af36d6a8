"""The work of each rank in each update: the same samples for any number of ranks."""

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import PlanError
from orchestrator.plan import order
from orchestrator.plan.split import assign, assign_leaves
from orchestrator.plan.window import WindowPlanner, planner_of
from tests.plan.stated import make_plan
from tests.refusals import refused


def planner(**values) -> WindowPlanner:
    base = {"nodes": 1, "ranks_per_node": 3, "dataset_samples": 50, "global_batch": 16}
    return planner_of(make_plan(**base | values))


def samples_of(planner: WindowPlanner, update: int, assignment=None) -> list[int]:
    ranks = planner.ranks if assignment is None else assignment.ranks
    windows = [planner.window(update, rank, assignment) for rank in range(ranks)]
    return [index for w in windows for one in w.micro_batches for index in one.indices]


@given(
    ranks=st.integers(1, 20),
    update=st.integers(0, 30),
    values=st.fixed_dictionaries(
        {
            "dataset_samples": st.integers(1, 100),
            "global_batch": st.integers(1, 100),
            "ragged": st.sampled_from(["update", "carry"]),
            "seed": st.integers(0, 99),
        }
    ),
    cut=st.sampled_from(
        [{"steps": 3}, {"micro_batch": 4}, {"micro_batch": 4, "reduction": "reproducible"}]
    ),
)
def test_ranks_together_compute_the_update_in_its_order(ranks, update, values, cut):
    some = planner(ranks_per_node=ranks, **values, **cut)
    expected = some.order.indices(update).tolist()
    assert samples_of(some, update) == expected
    for rank in range(ranks):
        window = some.window(update, rank)
        assert window.samples == len(expected)
        assert len(window.micro_batches) <= window.steps
        for one in window.micro_batches:
            assert one.indices
            assert list(one.indices) == expected[one.start : one.start + len(one.indices)]
    assert samples_of(planner(ranks_per_node=1, **values, **cut), update) == expected


def test_a_rank_computes_the_samples_of_its_own_share_only(monkeypatch):
    computed = []
    permute = order.permuted

    def counted(positions, *more):
        computed.append(len(positions))
        return permute(positions, *more)

    monkeypatch.setattr(order, "permuted", counted)
    large = planner(ranks_per_node=100, dataset_samples=10**8, global_batch=10**7, micro_batch=500)
    window = large.window(3, 70)
    assert sum(len(one.indices) for one in window.micro_batches) == 10**5
    assert sum(computed) <= 10**5 + 2 * order.BLOCK, "of ten million"


def test_the_last_window_of_an_epoch_is_divided_over_all_ranks():
    small = planner(steps=2)
    assert [small.order.samples_of(update) for update in range(5)] == [16, 16, 16, 2, 16]
    windows = [small.window(3, rank) for rank in range(3)]
    assert [[len(one.indices) for one in w.micro_batches] for w in windows] == [[1], [1], []]
    assert [w.steps for w in windows] == [1, 1, 1]
    assert [small.window(update, 0).epoch for update in range(5)] == [0, 0, 0, 0, 1]


def test_another_assignment_computes_the_same_samples():
    some = planner(steps=2)
    uneven = assign([10, 0, 6], steps=2)
    assert samples_of(some, 1, uneven) == samples_of(some, 1)
    assert some.window(1, 1, uneven).micro_batches == ()
    survivors = assign([9, 7], steps=2)
    assert samples_of(some, 1, survivors) == samples_of(some, 1)


def test_leaves_move_between_ranks_whole():
    some = planner(micro_batch=3, reduction="reproducible")
    moved = assign_leaves([0, 1, 5], samples=16, leaf_size=3)
    even = [piece for rank in range(3) for piece in some.window(0, rank).micro_batches]
    assert [piece for r in range(3) for piece in some.window(0, r, moved).micro_batches] == even
    with refused(PlanError, "6 7 3 accumulation.reduction=reproducible"):
        some.window(0, 0, assign([8, 4, 4], cap=3))


def test_the_learning_rate_is_the_schedule_s():
    some = planner(updates=20, warmup_updates=4, decay="linear", base_lr=1.0)
    assert some.window(1, 0).learning_rate == 0.5
    assert some.window(19, 2).learning_rate == 0.0


def test_windows_that_cannot_be_are_refused():
    some = planner()
    with refused(PlanError, "rank 3"):
        some.window(0, 3)
    with refused(PlanError, "update 0 16 15"):
        some.window(0, 0, assign([15, 0, 0], steps=1))
    with refused(PlanError, "size data"):
        planner(dataset_samples=None)
