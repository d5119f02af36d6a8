"""The reproducible reduction gives one digest for any assignment of leaves to ranks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator import Loss
from orchestrator.engine.torch import Accumulator
from orchestrator.engine.torch.model import seed_everything
from orchestrator.engine.torch.reproducible import are_siblings, gap_in, nodes_of
from orchestrator.engine.torch.state import weights_sha256
from orchestrator.errors import PlanError
from orchestrator.local_ranks.processes import run_ranks
from orchestrator.local_ranks.threads import run_in_threads
from tests.engine.torch.jobs import sgd_accumulator

LEAF = 3


def _model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 9), torch.nn.Dropout(0.3), torch.nn.LayerNorm(9), torch.nn.Linear(9, 2)
    )


def _train(group, edges, samples, updates=3, counted=False):
    """Train with leaves edges[r]..edges[r+1]-1 on rank r; digest, losses, norms and memory.

    `counted`: the accumulator is not told which leaves those are.
    """
    made = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 6, generator=made)
    y = torch.randn(samples, 2, generator=made)
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ours = Accumulator(model, optimizer, group, clip_norm=0.5, reduction="reproducible")
    reports = []
    for update in range(updates):
        ours.begin_window(leaves=None if counted else -(-samples // LEAF))
        for leaf in range(edges[group.rank], edges[group.rank + 1]):
            seed_everything(1000 * update + leaf)
            here = slice(leaf * LEAF, (leaf + 1) * LEAF)
            total = ((model(x[here]) - y[here]) ** 2).sum()
            ours.backward(Loss(total, weight=0.1 * len(x[here])), leaf=None if counted else leaf)
        report = ours.boundary()
        reports.append((report.loss, report.weight, report.gradient_norm))
    ours.close()
    return weights_sha256(model), reports, ours._reduction.buffers_made


@given(data=st.data(), samples=st.integers(1, 40), counted=st.booleans())
@settings(max_examples=60)
def test_one_digest_for_any_assignment_in_threads(data, samples, counted):
    leaves = -(-samples // LEAF)
    wanted = run_in_threads(1, lambda group: _train(group, [0, leaves], samples)[:2])[0]
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, leaves), max_size=6))), leaves]
    for found in run_in_threads(
        len(edges) - 1, lambda group: _train(group, edges, samples, counted=counted)
    ):
        assert found[:2] == wanted


def test_numbered_and_counted_leaves_together_are_refused_by_all_ranks():
    def train(group):
        with pytest.raises(PlanError, match="ranks do not agree on the update's leaves"):
            _train(group, [0, 4, 10], 29, counted=group.rank == 1)

    run_in_threads(2, train)


def test_gloo_gives_the_digest_of_one_process(tmp_path):
    wanted = run_in_threads(1, lambda group: _train(group, [0, 10], 29)[:2])[0]
    for number, edges in enumerate(([0, 3, 10], [0, 1, 9, 10])):
        folder = tmp_path / str(number)
        folder.mkdir()
        for found in run_ranks(len(edges) - 1, folder, _train, edges, 29):
            assert found[:2] == wanted


def test_a_parameter_without_numbers_may_have_a_buffer_of_its_own():
    def train(group):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        model.empty = torch.nn.Parameter(torch.empty(0, dtype=torch.float64))
        ours = sgd_accumulator(model, group, reduction="reproducible")
        for number in range(3):  # of 6 leaves: each rank has two nodes of the tree
            total = model(torch.full((2, 3), 1.0 + number)).square().sum() + model.empty.sum()
            ours.backward(Loss(total, weight=2))
        ours.boundary()
        return weights_sha256(model)

    assert len(set(run_in_threads(2, train))) == 1


@given(leaves=st.integers(1, 200), data=st.data())
def test_memory_stays_within_two_buffers_and_the_height_of_the_tree(leaves, data):
    first = data.draw(st.integers(0, leaves - 1))
    last = data.draw(st.integers(first + 1, leaves))
    stack, most = [], 0
    for leaf in range(first, last):
        most = max(most, len(stack) + 1)
        node = (leaf, leaf + 1)
        while stack and are_siblings(stack[-1], node, leaves):
            node = (stack.pop()[0], node[1])
        stack.append(node)
    assert stack == nodes_of((first, last), leaves), "folding gives the canonical nodes"
    # Canonical nodes of a range in the middle may be twice as many as the tree is high.
    assert most <= 2 + 2 * math.log2(last - first + 1)


def test_buffers_of_equal_ranks_stay_within_the_promise():
    for leaves_per_rank in (1, 2, 4, 8):
        edges = [r * leaves_per_rank for r in range(3)]
        for *_, made in run_in_threads(2, lambda g, e=edges: _train(g, e, LEAF * e[-1])):
            assert made <= 2 + math.log2(leaves_per_rank)


def test_leaves_of_no_rank_or_of_two_are_refused_by_all_ranks():
    def train(group, edges):
        with pytest.raises(PlanError, match="belongs to"):
            _train(group, edges[group.rank], 29)

    for edges in ([[0, 4], [0, 5, 10]], [[0, 4], [0, 3, 10]], [[0, 4], [0, 4, 9]]):
        run_in_threads(2, lambda group, e=edges: train(group, e))


def test_leaves_out_of_turn_are_refused():
    ours = sgd_accumulator(model := _model(), reduction="reproducible")
    with pytest.raises(ValueError, match=r"the update's leaves over all ranks, 1 or more"):
        ours.begin_window(leaves=0)
    ours.begin_window(leaves=4)
    ours.backward(Loss(model(torch.ones(1, 6)).sum(), 1.0), leaf=0)
    with pytest.raises(ValueError, match="1 is due, but it is 2"):
        ours.backward(Loss(model(torch.ones(1, 6)).sum(), 1.0), leaf=2)


def _tree(lo, hi):
    """All nodes of the tree over these leaves, and its pairs of siblings, as its rule says."""
    if hi - lo == 1:
        return [(lo, hi)], []
    half = max(1 << power for power in range(20) if 1 << power < hi - lo)
    left, right = _tree(lo, lo + half), _tree(lo + half, hi)
    pair = ((lo, lo + half), (lo + half, hi))
    return [(lo, hi), *left[0], *right[0]], [pair, *left[1], *right[1]]


@pytest.mark.parametrize("leaves", range(1, 19))
def test_siblings_are_exactly_the_two_children_of_one_node(leaves):
    nodes, pairs = _tree(0, leaves)
    assert {(a, b) for a in nodes for b in nodes if are_siblings(a, b, leaves)} == set(pairs)


@pytest.mark.parametrize("leaves", range(1, 19))
def test_a_range_is_made_of_the_fewest_nodes_from_left_to_right(leaves):
    nodes = _tree(0, leaves)[0]
    for first in range(leaves):
        assert nodes_of((first, first), leaves) == []
        for last in range(first + 1, leaves + 1):
            within = [n for n in nodes if first <= n[0] and n[1] <= last]
            largest = [n for n in within if not any(m != n and _holds(m, n) for m in within)]
            assert nodes_of((first, last), leaves) == sorted(largest)


def _holds(outer, inner):
    return outer[0] <= inner[0] and inner[1] <= outer[1]


@pytest.mark.parametrize(
    ("owned", "fault"),
    [
        ([(0, 10)], ""),
        ([(4, 10), (0, 4)], ""),
        ([(0, 4), (0, 0), (7, 7), (4, 10)], ""),
        ([(0, 1), (1, 2), (2, 10)], ""),
        ([], "leaf 0 belongs to no rank"),
        ([(1, 10)], "leaf 0 belongs to no rank"),
        ([(0, 4)], "leaf 4 belongs to no rank"),
        ([(0, 9)], "leaf 9 belongs to no rank"),
        ([(0, 4), (5, 10)], "leaf 4 belongs to no rank"),
        ([(0, 4), (3, 10)], "leaf 3 belongs to two ranks"),
        ([(0, 10), (0, 10)], "leaf 0 belongs to two ranks"),
        ([(0, 10), (9, 10)], "leaf 9 belongs to two ranks"),
    ],
)
def test_a_leaf_of_no_rank_or_of_two_is_named(owned, fault):
    assert gap_in(owned, leaves=10) == fault
