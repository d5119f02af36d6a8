"""Loops with a fault and right ones, judged on one and three ranks (elsewhere on two)."""

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from orchestrator.audit.auditing import Audit
from orchestrator.audit.faults import FAULTS
from orchestrator.audit.judge import RIGHT, ROWS, SLOW, UNJUDGED, WRONG, judge, read_trace
from orchestrator.audit.loss_graph import read_loss
from orchestrator.audit.separability import (
    Recorder,
    Replay,
    compare_samples,
    find_reductions,
    own_sum,
)
from tests import warm
from tests.audit import drawn, kinds, loop
from tests.audit.observed import NAMES

pytestmark = pytest.mark.long

NEED_RANKS = {
    "mean-of-means-over-ranks",
    "not-reduced",
    "reduced-each-micro-step",
    "same-data",
    "clipped-before-reduction",
    "fewer-micro-steps",
}


@pytest.mark.parametrize("size", [1, 3])
def test_each_fault_is_found_and_correct_loops_pass(tmp_path, size):
    warm.ranks("tests.audit.observed", size, tmp_path)
    for name in NAMES:
        traces = [read_trace(tmp_path / name, rank) for rank in range(size)]
        made = Audit(size, judgement=judge(traces))
        if name == "none" or name in loop.RIGHT:
            states = {row: made.judgement.state(row) for row in ROWS}
            assert set(states.values()) == {RIGHT}, (name, states)
            assert max(u["relative_error"] for u in made.judgement.updates) < 1e-6
            noted = any("learning rate changes" in note for note in made.judgement.notes)
            assert noted == (name == "schedule-each-micro-step")
        elif name in loop.NOT_WRONG:
            assert made.state != WRONG, (name, made.judgement.findings)
        elif size == 1 and name in NEED_RANKS:
            assert made.state == RIGHT or name == "fewer-micro-steps", (name, made.judgement)
            assert set(made.judgement.faults) <= FAULTS.keys()
        else:
            state = SLOW if name == "reduced-each-micro-step" else WRONG
            assert (made.state, made.judgement.faults) == (state, [loop.ALSO.get(name, name)])


def test_loops_of_everyday_kinds_get_their_verdict_and_no_false_one(tmp_path):
    warm.ranks("tests.audit.kinds", 1, tmp_path)
    states, findings = {}, {}
    for name in kinds.LOOPS:
        made = Audit(1, judgement=judge([read_trace(tmp_path / name, 0)]))
        states[name], findings[name] = made.state, made.judgement.findings
    for name, (_, state) in kinds.LOOPS.items():
        assert states[name] == state, (name, [f for f in findings[name] if f.state != RIGHT])


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
        "two terms": ((scores**2).mean() + scores.abs().mean(), 1 / 28, 28),
        "a product": ((scores**2).mean() * scores.abs().mean(), None, None),
    }


@pytest.mark.parametrize("name", losses(torch.zeros(4, 7)))
def test_the_weight_of_a_sample_is_read(name):
    layer = torch.nn.Linear(5, 7)
    loss, weight, units = losses(layer(torch.randn(4, 5)))[name]
    found = read_loss([loss])
    if weight is None:
        assert found.reason
        return
    loss.backward()
    [one] = found.reductions
    assert one.units == units
    assert one.gradient / (one.elements if one.is_mean else 1) == pytest.approx(weight)


# ------------------------------------------------------------------ Samples that are replaced

X, WEIGHTS = torch.randn(4, 5, 3), torch.tensor([1.0, 2.0, 0.5, 3.0])
LENGTHS = (torch.arange(5) < torch.tensor([2, 5, 1, 3])[:, None]).float()
ATTENTION = torch.nn.MultiheadAttention(3, 1)  # over the first dimension
BY_ROWS = torch.nn.MultiheadAttention(3, 1, batch_first=True)
RECURRENT = torch.nn.LSTM(3, 3, batch_first=True)


def each(scores):
    return (scores - X).square().mean(-1)


def detached_keys(scores):
    return functional.cross_entropy(scores[:, 0] @ scores[:, 0].detach().T, torch.arange(4))


def through_numpy(scores):
    centred = WEIGHTS.numpy() - WEIGHTS.numpy().mean()
    return (each(scores).mean(1) * torch.from_numpy(centred)).mean()


SEPARABLE = {
    "weighted": lambda z: (each(z) * WEIGHTS[:, None] / 7).sum(),
    "masked": lambda z: (each(z) * LENGTHS).sum() / LENGTHS.sum(),
    "normalised in a sample": lambda z: (each(z) * (LENGTHS / LENGTHS.sum(1, True))).sum(),
    "attention over tokens": lambda z: each(BY_ROWS(z, z, z)[0]).mean(),
    "recurrent": lambda z: each(RECURRENT(z)[0]).mean(),
    "two terms": lambda z: each(z).mean() + 0.1 * z.abs().mean(),
    "dropout": lambda z: each(functional.dropout(z)).mean(),
    "written in place": lambda z: each(torch.zeros(4, 5, 3).copy_(z).mul_(2)).mean(),
}
MIXED = {
    "normalised weights": lambda z: (each(z) * (LENGTHS / LENGTHS.sum())).sum(),
    "by the largest": lambda z: (each(z).mean(1) * (WEIGHTS / WEIGHTS.max())).mean(),
    "advantages": lambda z: (each(z).mean(1) * (WEIGHTS - WEIGHTS.mean())).mean(),
    "detached keys": detached_keys,
    "through numpy": through_numpy,
    "batch statistics": lambda z: each((z - z.mean(0)) / z.std(0)).mean(),
    "detached statistics": lambda z: each(z - z.mean(0).detach()).mean(),
    "attention over samples": lambda z: each(ATTENTION(z, z, z)[0]).mean(),
    "a term over samples": lambda z: each(z).mean() + ((z - z.mean(0)) ** 2).mean(),
    "the sample before": lambda z: (z - z.roll(1, 0)).square().mean(),
}


def replay_of(loss):
    layer = torch.nn.Linear(3, 3)
    recorder = Recorder()
    recorder.start()
    root = loss(layer(X))
    recorder.stop()
    reductions = find_reductions(recorder, read_loss([root]).nodes)
    assert reductions is not None
    state = {
        id(p) for module in (layer, ATTENTION, BY_ROWS, RECURRENT) for p in module.parameters()
    }
    return Replay(recorder, reductions, state, len(X))


def replayed(loss):
    """Return how samples mix in a loss and what is untested, by its replay."""
    replay = replay_of(loss)
    random = torch.get_rng_state()
    results = compare_samples(replay)
    assert torch.equal(random, torch.get_rng_state())
    return results


@pytest.mark.parametrize("name", SEPARABLE)
def test_separable_losses_pass_the_replay(name):
    assert replayed(SEPARABLE[name]) == (None, None)


@pytest.mark.parametrize("name", MIXED)
def test_losses_over_other_samples_are_named_with_their_line(name):
    mixed, untested = replayed(MIXED[name])
    assert "test_loops.py:" in (mixed or untested or "")


def test_a_sum_over_the_samples_that_elements_are_divided_by_is_known_from_other_mixtures():
    assert own_sum(replay_of(MIXED["normalised weights"])) == pytest.approx(float(LENGTHS.sum()))
    softmax = WEIGHTS.exp() / WEIGHTS.exp().sum()
    assert own_sum(replay_of(lambda z: (each(z).mean(1) * softmax).sum())) is None, "no samples"
    found = own_sum(
        replay_of(lambda z: (each(z).mean(1) * (WEIGHTS.exp() / WEIGHTS.exp().sum())).sum())
    )
    assert found == pytest.approx(float(WEIGHTS.exp().sum()))
    for name in ("by the largest", "advantages", "detached statistics", "the sample before"):
        assert own_sum(replay_of(MIXED[name])) is None, name


def test_a_mode_of_the_script_keeps_its_place():
    class Mode(TorchDispatchMode):
        pass

    recorder = Recorder()
    recorder.start()
    with Mode():
        recorder.stop()
        assert recorder.records
        recorder.start()
    recorder.stop()
    assert not recorder.records


# ------------------------------------------------------------------ Loops drawn at random


def test_drawn_loops_get_no_false_word_and_everyday_ones_are_judged(tmp_path):
    warm.ranks("tests.audit.drawn", 1, tmp_path)
    seen = set()
    for folder in sorted(tmp_path.glob("*/"), key=lambda part: int(part.name)):
        parts = drawn.draw(int(folder.name))
        made = Audit(1, judgement=judge([read_trace(folder, 0)]))
        error = float((folder / "error").read_text())
        if made.state == RIGHT:
            assert error < 1e-4, (folder.name, parts, error)
        if made.state == WRONG:
            assert error > 1e-4, (folder.name, parts, error, made.judgement.findings)
        if parts["everyday"]:
            assert made.state == RIGHT, (folder.name, parts, made.judgement.findings)
        seen.add(made.state)
    assert seen == {RIGHT, WRONG, UNJUDGED}
