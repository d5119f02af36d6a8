"""Loops with a fault and right ones, judged on one and three ranks (elsewhere on two)."""

import pytest
import torch
from torch.nn import functional

from orchestrator.audit.faults import FAULTS
from orchestrator.audit.judge import RIGHT, ROWS, WRONG, judge, read_trace
from orchestrator.audit.loss_graph import mixes_samples, read_loss
from orchestrator.cli.audit import Audit
from tests import warm
from tests.audit import loop
from tests.audit.observed import NAMES

NEED_RANKS = {
    "mean-of-means-over-ranks", "not-reduced", "reduced-each-micro-step", "same-data",
    "clipped-before-reduction", "fewer-micro-steps",
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 3])
def test_each_fault_is_named_and_no_other_and_right_loops_are_right_in_every_row(tmp_path, size):
    warm.ranks("tests.audit.observed", size, tmp_path)
    for name in NAMES:
        traces = [read_trace(tmp_path / name, rank) for rank in range(size)]
        made = Audit(size, judgement=judge(traces))
        if name == "none" or name in loop.RIGHT:
            states = {row: made.judgement.state(row) for row in ROWS}
            assert set(states.values()) == {RIGHT}, (name, states)
            assert max(u["relative_error"] for u in made.judgement.updates) < 1e-6
        elif name in loop.NOT_WRONG:
            assert made.state != WRONG, (name, made.judgement.findings)
        elif size == 1 and name in NEED_RANKS:
            assert made.state == RIGHT or name == "fewer-micro-steps", (name, made.judgement)
            assert set(made.judgement.faults) <= FAULTS.keys()
        else:
            assert (made.state, made.judgement.faults) == (WRONG, [loop.ALSO.get(name, name)])


# ------------------------------------------------------------------ The graph of a loss


TARGETS = torch.tensor([1, 2, -100, 3])
MASK = torch.tensor([1.0, 1.0, 0.0, 1.0])
PER_ROW = {"reduction": "none"}


def losses(scores):
    """Return losses with the weight of a sample and their units; None where they are not judged."""
    cross_entropy = functional.cross_entropy
    each = cross_entropy(scores, TARGETS, **PER_ROW)
    return {
        "mean": (cross_entropy(scores, TARGETS) / 4, 1 / 12, 3),
        "sum": (cross_entropy(scores, TARGETS, reduction="sum") / 3, 1 / 3, 3),
        "smoothed": (cross_entropy(scores, TARGETS, label_smoothing=0.1) / 4, 1 / 12, 3),
        "masked": ((each * MASK).sum() / 3, 1 / 3, 3),
        "ignored": (each.sum(), 1.0, 3),
        "squares": (functional.mse_loss(scores, torch.zeros(4, 7)), 1 / 28, 28),
        "mean of means": ((scores**2).mean(1).mean() / 3, 1 / 12, 4),
        "one of several": ((each.mean() * MASK)[0], None, None),
        "root": ((scores**2).mean().sqrt(), None, None),
        "two terms": ((scores**2).mean() + scores.abs().mean(), None, None),
    }


@pytest.mark.parametrize("name", losses(torch.zeros(4, 7)))
def test_the_weight_of_a_sample_is_read(name):
    layer = torch.nn.Linear(5, 7)
    loss, weight, units = losses(layer(torch.randn(4, 5)))[name]
    found = read_loss([loss], lambda: True)
    if weight is None:
        assert found.reason
        return
    assert mixes_samples(found, []) is False
    loss.backward()
    [one] = found.reductions
    assert one.units == units
    assert one.gradient / (one.elements if one.is_mean else 1) == pytest.approx(weight)


@pytest.mark.parametrize(
    "loss",
    [
        lambda z: functional.cross_entropy(z @ z.T, torch.arange(4)),
        lambda z: ((z - z.roll(1, 0)) ** 2).mean(),
    ],
)
def test_a_loss_over_other_samples_is_seen(loss):
    weights = torch.randn(5, 7, requires_grad=True)
    scores = torch.randn(4, 5) @ weights
    assert mixes_samples(read_loss([loss(scores)], lambda: True), [scores])
    assert mixes_samples(read_loss([loss(scores)], lambda: True), [])
