"""Work by cost: every sample once, within the budget, and as even as contiguous runs can be."""

import re
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import PlanError
from orchestrator.plan.cost import TokenBudget, WorkByCost, deal, lengths_of, split_by_cost
from orchestrator.plan.split import even_parts, split_leaves
from orchestrator.plan.window import planner_of
from tests.plan.stated import make_plan
from tests.refusals import refused

LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=60)
SPEED = st.floats(0.1, 8)


def micro_steps(split):
    """Return the positions of each micro-step, rank after rank."""
    starts = [piece for rank in range(split.ranks) for piece in split.pieces(rank)]
    return [split.order[start : start + count] for start, count in starts]


@given(steps=st.integers(1, 60), ranks=st.integers(1, 20), cost=st.floats(0.1, 1e6))
def test_equal_costs_and_speeds_give_the_even_division(steps, ranks, cost):
    even = list(even_parts(steps, ranks))
    assert deal([cost] * steps, ranks) == even
    assert deal([cost] * steps, ranks, [3.0] * ranks) == even
    assert deal([cost, *[1.0] * (steps - 1)], ranks, in_step=True) == even


@given(
    costs=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    speeds=st.lists(SPEED, min_size=1, max_size=4),
    measured=st.booleans(),
)
def test_no_other_runs_are_done_sooner(costs, speeds, measured):
    if not measured:
        speeds = [1.0] * len(speeds)

    def seconds(edges):
        return max(
            sum(costs[first:last]) / speed
            for (first, last), speed in zip(pairwise(edges), speeds, strict=True)
        )

    counts = deal(costs, len(speeds), speeds if measured else None)
    assert sum(counts) == len(costs)
    edges = [sum(counts[:rank]) for rank in range(len(speeds) + 1)]
    inner = combinations_with_replacement(range(len(costs) + 1), len(speeds) - 1)
    best = min(seconds([0, *cuts, len(costs)]) for cuts in inner)
    if measured:
        assert min(counts) > 0 or len(costs) < len(speeds)
    if 1 not in counts or not measured:  # a rank may have one to be measured by
        assert seconds(edges) <= best * 1.002


@given(
    lengths=LENGTHS,
    ranks=st.integers(1, 9),
    tokens=st.integers(1, 300),
    pad_to=st.sampled_from([1, 8]),
    reproducible=st.booleans(),
    data=st.data(),
)
def test_every_sample_is_computed_once_within_the_budget(
    lengths, ranks, tokens, pad_to, reproducible, data
):
    speeds = data.draw(st.one_of(st.none(), st.lists(SPEED, min_size=ranks, max_size=ranks)))
    budget = TokenBudget(micro_tokens=tokens, pad_to=pad_to)
    given_lengths = np.array(lengths)
    split = split_by_cost(given_lengths, ranks, budget, reproducible=reproducible, speeds=speeds)
    steps = micro_steps(split)
    assert sorted(position for step in steps for position in step) == list(range(len(lengths)))
    assert split.samples == len(lengths)
    for step in steps:
        assert list(step) == sorted(step)
        padded = -(-max(1, *(lengths[position] for position in step), 0) // pad_to) * pad_to
        assert padded * len(step) <= tokens or len(step) == 1
    if reproducible:  # leaves: on any ranks, at any speeds
        alone = split_by_cost(given_lengths, 1, budget, reproducible=True)
        assert micro_steps(alone) == steps


@given(
    samples=st.integers(1, 200),
    length=st.integers(1, 50),
    each=st.integers(1, 30),
    ranks=st.integers(1, 9),
)
def test_equal_lengths_give_leaves_as_they_come(samples, length, each, ranks):
    budget = TokenBudget(micro_tokens=each * length)
    lengths = np.full(samples, length)
    split = split_by_cost(lengths, ranks, budget, reproducible=True)
    sizes = {size for steps in split.micro_batches for size in steps}
    by_number = split_leaves(samples, ranks, max(sizes))
    assert split.order == tuple(range(samples))
    assert sum(split.micro_batches, ()) == sum(by_number.micro_batches, ())
    if len(sizes) == 1:  # else the last is shorter, which costs less
        assert split == replace(by_number, order=split.order)


def test_a_cost_decides_where_it_is_given():
    lengths = np.array([100, *[10] * 40])
    by_tokens = split_by_cost(lengths, 2, TokenBudget(micro_tokens=100))
    squared = TokenBudget(micro_tokens=100, cost=lambda length, samples: samples * length**2)
    by_squares = split_by_cost(lengths, 2, squared)
    assert by_tokens.samples_per_rank[0] > 10
    assert by_squares.samples_per_rank == (1, 40)


def test_a_budget_beyond_the_update_leaves_no_rank_without_work():
    split = split_by_cost(np.arange(1, 49), 4, TokenBudget(micro_tokens=10**9))
    assert not split.idle_ranks
    assert WorkByCost(np.arange(1, 49), TokenBudget(micro_tokens=10**9)).most_samples > 48


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_the_cost_of_a_window_is_in_the_unit_of_the_cost_function(unit):
    """Else measured speeds would count micro-steps, or only their cost, by that unit."""
    lengths = np.array([9, 7, 5, 3, 1, 1])
    micro_batches = [[0], [1, 2], [3, 4, 5]]
    by_tokens = WorkByCost(lengths, TokenBudget(micro_tokens=18))
    budget = TokenBudget(micro_tokens=18, cost=lambda length, samples: unit * length * samples)
    cost = WorkByCost(lengths, budget).cost(micro_batches)
    assert cost == pytest.approx(unit * by_tokens.cost(micro_batches))


def test_a_digest_of_costs_tells_cost_functions_apart():
    def digest(cost):
        return WorkByCost(np.arange(1, 200), TokenBudget(micro_tokens=400, cost=cost)).cost_digest

    tokens = digest(lambda length, samples: length * samples)
    assert digest(None) is None
    assert tokens == digest(lambda length, samples: samples * length)
    assert tokens != digest(lambda length, samples: length * samples + 1)
    assert tokens != digest(lambda length, samples: length * (samples if samples == 1 else 2))


@pytest.mark.parametrize(
    "cost",
    [
        lambda *_: 0,
        lambda *_: float("inf"),
        lambda *_: -1.0,
        lambda *_: None,
        lambda *_: "much",
        lambda *_: 10**400,
    ],
)
def test_a_cost_that_is_no_cost_is_refused(cost):
    with refused(PlanError, "cost(9, 1) 0"):
        split_by_cost(np.array([9]), 1, TokenBudget(micro_tokens=9, cost=cost))


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ([1, 2], "3 2"),
        ((n for n in [1, 2, 3]), "3 generator"),
        ([[1], [2], [3]], "3 (3, 1)"),
        ([0, 0, 0], "3 0"),
        ([1, -2, 3], "0 1 -2"),
        ([1, 2.5, 3], "whole float64"),
        (["1", "2", "x"], "whole"),
        ([[1], [2, 3], [4]], "whole"),
        ([1, float("nan"), 3], "whole nan"),
        ([1, float("inf"), 3], "2**53 1 inf"),
        ([1, 2, 2**63], "2**53 2"),
    ],
)
def test_lengths_that_are_none_are_refused(values, names):
    with refused(PlanError, f"lengths {names}"):
        lengths_of(values, 3)


@pytest.mark.parametrize("speeds", [[1.0], [1.0, 0.0], [1.0, float("nan")]])
def test_speeds_that_are_none_are_refused(speeds):
    with refused(PlanError, "2 speeds 0"):
        deal([1.0, 2.0], 2, speeds)


def test_windows_have_the_samples_of_their_update_in_numbered_micro_steps():
    lengths = np.arange(50) % 17 + 1
    values = {"ranks_per_node": 3, "dataset_samples": 50, "global_batch": 16, "nodes": 1}
    planner = planner_of(make_plan(**values, micro_tokens=40, lengths=lengths))
    windows = [planner.window(3, rank) for rank in range(3)]
    steps = [micro_batch for window in windows for micro_batch in window.micro_batches]
    assert [step.number for step in steps] == list(range(windows[0].micro_step_count))
    indices = planner.order.indices(3).tolist()
    for step in steps:
        assert list(step.indices) == [indices[position] for position in step.positions]
        assert step.start == min(step.positions)
    assert sorted(p for step in steps for p in step.positions) == list(range(len(indices)))


def test_plan_without_lengths_has_unknown_figures():
    figures = make_plan(nodes=1, ranks_per_node=2, global_batch=16, micro_tokens=64).figures()
    unknown = ("micro_steps", "samples_per_rank", "micro_batches", "steps", "micro_batch")
    assert [figures[name] for name in unknown] == [None] * len(unknown)
    assert figures["micro_tokens"] == 64


def test_token_budget_below_all_or_some_lengths():
    values = {"nodes": 1, "ranks_per_node": 2, "dataset_samples": 8, "global_batch": 4}
    lengths = np.array([9, 9, 9, 9, 9, 9, 9, 30])
    with refused(PlanError, "accumulation.micro_tokens=8 9 accumulation.micro_tokens=30"):
        make_plan(**values, micro_tokens=8, lengths=lengths)
    plan = make_plan(**values, micro_tokens=20, lengths=lengths)
    assert "1 sample of 8 is longer than accumulation.micro_tokens=20" in " ".join(plan.warnings)


def test_leaves_that_ranks_share_unevenly_are_warned_of():
    # Leaves of 5, 5, 5 and 6 tokens are two for each rank; one of 10 tokens cannot be shared.
    plan = make_plan(
        nodes=1,
        ranks_per_node=2,
        dataset_samples=4,
        global_batch=4,
        reduction="reproducible",
        micro_tokens=10,
        lengths=np.array([5, 5, 5, 6]),
    )
    warning = " ".join(plan.warnings)
    assert "accumulation.micro_batch=1 in the place of accumulation.micro_tokens" in warning
    assert "the busiest would have 0.73 times as much" in warning


MEASURED = "accumulation.balance=measured accumulation.balance=even"


@pytest.mark.parametrize(
    ("batch", "key"),
    [
        ({"global_batch": 5, "steps": 1}, "global_batch"),
        ({"global_batch": 22, "micro_batch": 4, "reduction": "reproducible"}, "micro_batch"),
        ({"global_batch": 7, "micro_batch": 7, "reduction": "reproducible"}, "micro_batch"),
    ],
)
def test_too_little_work_for_measured_ranks_is_refused(batch, key):
    values = {"nodes": 1, "ranks_per_node": 7, "dataset_samples": 80, "balance": "measured"}
    with refused(PlanError, MEASURED) as caught:
        make_plan(**values, **batch)
    value = int(re.search(rf"accumulation\.{key}=(\d+)", str(caught.value))[1])
    assert not make_plan(**values, **batch | {key: value}).split.idle_ranks
    worse = value - 1 if key == "global_batch" else value + 1
    with refused(PlanError, MEASURED):
        make_plan(**values, **batch | {key: worse})


def test_too_few_micro_steps_by_length_are_refused():
    values = {
        "nodes": 1,
        "ranks_per_node": 5,
        "dataset_samples": 80,
        "balance": "measured",
        "global_batch": 16,
        "reduction": "reproducible",
        "lengths": np.full(80, 8),
    }
    with refused(PlanError, MEASURED) as caught:
        make_plan(**values, micro_tokens=64)
    tokens = int(re.search(r"accumulation\.micro_tokens=(\d+)", str(caught.value))[1])
    assert not make_plan(**values, micro_tokens=tokens).split.idle_ranks
    with refused(PlanError, MEASURED):
        make_plan(**values, micro_tokens=tokens + 1)
    few = {"dataset_samples": 3, "lengths": np.full(3, 8), "global_batch": 3}
    with refused(PlanError, "accumulation.balance=measured 3 ranks accumulation.balance=even"):
        make_plan(**values | few, micro_tokens=64)


@given(LENGTHS, st.integers(1, 4), st.integers(8, 200))
def test_ranks_in_step_have_rounds_of_micro_steps_that_cost_alike(lengths, ranks, tokens):
    budget = TokenBudget(micro_tokens=tokens)
    split = split_by_cost(np.array(lengths), ranks, budget, in_step=True)
    assert sorted(split.order) == list(range(len(lengths)))
    steps = [len(sizes) for sizes in split.micro_batches]
    assert steps == list(even_parts(sum(steps), ranks))
    costs = iter(max(1, *(lengths[p] for p in step)) * len(step) for step in micro_steps(split))
    of_ranks = [[next(costs) for _ in range(count)] for count in steps]
    in_order = [
        rank[number]
        for number in range(max(steps))
        for rank in of_ranks[: sum(count > number for count in steps)]
    ]
    assert in_order == sorted(in_order, reverse=True)
