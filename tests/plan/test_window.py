"""What each rank does in each update: the same samples, whoever computes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import PlanError
from orchestrator.plan.window import WindowPlanner, planner_of
from tests.plan.stated import make_plan


def planner(**values) -> WindowPlanner:
    base = {"nodes": 1, "ranks_per_node": 3, "dataset_samples": 50, "global_batch": 16}
    return planner_of(make_plan(**base | values))


def samples_of(planner: WindowPlanner, update: int) -> list[int]:
    windows = [planner.window(update, rank) for rank in range(planner.ranks)]
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


def test_the_last_window_of_an_epoch_is_divided_over_all_ranks():
    small = planner(steps=2)
    assert [small.order.samples_of(update) for update in range(5)] == [16, 16, 16, 2, 16]
    windows = [small.window(3, rank) for rank in range(3)]
    assert [[len(one.indices) for one in w.micro_batches] for w in windows] == [[1], [1], []]
    assert [w.steps for w in windows] == [1, 1, 1]
    assert [small.window(update, 0).epoch for update in range(5)] == [0, 0, 0, 0, 1]


def test_the_learning_rate_is_the_schedule_s():
    some = planner(updates=20, warmup_updates=4, decay="linear", base_lr=1.0)
    assert some.window(1, 0).learning_rate == 0.5
    assert some.window(19, 2).learning_rate == 0.0


def test_windows_that_cannot_be_are_refused():
    some = planner()
    with pytest.raises(PlanError, match="there is no rank 3 among 3"):
        some.window(0, 3)
    with pytest.raises(PlanError, match="the number of an update=-1"):
        some.window(-1, 0)
    with pytest.raises(PlanError, match="need the size of the data set"):
        planner(dataset_samples=None)
