"""Batch norm, precision and seeds."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from orchestrator import Job, Loss
from orchestrator.engine.common.update_policy import FIRST_SCALE
from orchestrator.engine.torch.model import FrozenBatchNorm, seed_torch, with_norms
from orchestrator.errors import ConfigError, JobError
from orchestrator.local_ranks.threads import run_in_threads
from tests.engine.torch.jobs import numbers_of, sgd_accumulator
from tests.jobs.training import train
from tests.laws.problem import difference


class Pictures(Job):
    def model(self):
        return nn.Sequential(
            nn.Conv2d(1, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8 * 36, 6),
            nn.BatchNorm1d(6),
            nn.Linear(6, 1),
        )

    def dataset(self):
        made = torch.Generator().manual_seed(3)
        pictures = torch.randn(40, 1, 8, 8, generator=made)
        return TensorDataset(pictures, pictures.flatten(1).sum(1, keepdim=True).sin())

    def loss(self, model, batch):
        x, y = batch
        return Loss(((model(x) - y) ** 2).sum(), weight=len(x))


@pytest.mark.parametrize(
    ("norm", "exact", "words"),
    [
        ("warn", False, "batch norm in 1, 5 sees one micro-batch at a time"),
        ("frozen", True, "batch norm in 1, 5 keeps the statistics"),
        ("group", True, "batch norm in 1, 5 was replaced by group norm"),
        ("layer", True, "batch norm in 1, 5 was replaced by layer norm"),
    ],
)
def test_other_norms_give_one_update_for_any_split(norm, exact, words):
    given = {"samples": 12, "updates": 2, "norm": norm}
    [(alone, _, engine)] = train(Pictures(), 1, cap=12, **given)
    [warning] = engine.warnings()
    assert words in warning
    (found, *_), *_ = train(Pictures(), 2, cap=3, **given)
    trained = {name: value for name, value in alone.items() if value.is_floating_point()}
    assert (difference(found, trained) <= 1e-10) is exact


class Spectral(Pictures):
    def model(self):
        first = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 6))
        return nn.Sequential(nn.Flatten(), first, nn.Linear(6, 1))


def test_layers_whose_forward_changes_their_buffers_are_named():
    def loop():
        model = Spectral().model()
        ours = sgd_accumulator(model)
        for update in range(3):
            for _ in range(1 + (update == 0)):
                ours.backward(Loss(model(torch.ones(3, 1, 8, 8)).sum(), 3))
            ours.boundary()
        ours.close()

    given = {"samples": 12, "updates": 2}
    words = r"changes the buffers of 1\.parametrizations\.weight\.0, so what they hold depends"
    with pytest.warns(UserWarning, match=rf"{words}.* in after_update\(\)") as caught:
        train(Spectral(), 1, cap=6, **given)
    assert len(caught) == 1
    with pytest.warns(UserWarning, match=rf"{words}.* after boundary\(\)") as caught:
        loop()
    assert len(caught) == 1
    train(Spectral(), 1, cap=12, **given)  # one micro-step, one rank
    train(Pictures(), 1, cap=6, **given)  # of batch norm `warnings` says more


def test_a_frozen_norm_is_what_batch_norm_is_in_evaluation():
    layer = nn.BatchNorm2d(3)
    layer(torch.randn(8, 3, 2, 2) * 4 + 1)  # statistics of its own
    frozen, _ = with_norms(nn.Sequential(copy.deepcopy(layer)), "frozen")
    x = torch.randn(5, 3, 2, 2)
    assert torch.equal(frozen.train()(x), layer.eval()(x))
    assert frozen.state_dict().keys() == nn.Sequential(layer).state_dict().keys()


def test_a_shared_norm_stays_shared():
    shared = nn.BatchNorm2d(8)
    model, _ = with_norms(nn.Sequential(shared, nn.Conv2d(8, 8, 1), shared), "group")
    assert isinstance(model[0], nn.GroupNorm)
    assert model[0] is model[2]


def test_a_layer_norm_takes_all_channels_of_a_sample_together():
    model, _ = with_norms(nn.Sequential(nn.BatchNorm2d(8)), "layer")
    x = torch.randn(3, 8, 5, 5)
    torch.testing.assert_close(model(x), nn.functional.layer_norm(x, x.shape[1:]))


def test_a_model_that_is_a_norm_itself_is_replaced():
    model, sentences = with_norms(nn.BatchNorm1d(4), "frozen")
    assert isinstance(model, FrozenBatchNorm)
    assert "the model itself" in sentences[0]


def test_impossible_norms_are_refused_with_a_remedy():
    with pytest.raises(JobError, match="keeps no running statistics"):
        with_norms(nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)), "frozen")
    with pytest.raises(JobError, match="does not know its number of channels"):
        with_norms(nn.Sequential(nn.LazyBatchNorm2d()), "group")
    with pytest.raises(ConfigError, match=r"engine\.norm=froze"):
        with_norms(nn.Linear(1, 1), "froze")


# ------------------------------------------------------------------ Precision and seeds


def _train(group, precision, updates=3, boom=None, **more):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    ours = sgd_accumulator(model, group, precision=precision, clip_norm=1.0, **more)
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
    y = x.sum(1, keepdim=True).sin()
    reports = []
    for update in range(updates):
        for step in range(2):
            here = slice(6 * step + 3 * group.rank, 6 * step + 3 * group.rank + 3)
            with ours.precision.forward():
                total = ((model(x[here]) - y[here]).float() ** 2).sum()
            if boom == (update, group.rank):
                total = total * 1e9  # finite, but not its gradient as float16
            ours.backward(Loss(total, 3), last=step == 1)
        reports.append(ours.boundary())
    ours.close()
    return numbers_of(model), reports


@pytest.mark.parametrize(("precision", "tolerance"), [("bfloat16", 0.05), ("float16", 0.01)])
def test_autocast_trains_nearly_as_float32_does(precision, tolerance):
    wanted, _ = run_in_threads(2, lambda group: _train(group, "float32"))[0]
    results = run_in_threads(2, lambda group: _train(group, precision))
    for found, reports in results:
        assert torch.equal(found, results[0][0])
        assert all(report.applied for report in reports)
        assert {r.loss_scale for r in reports} == {FIRST_SCALE if precision == "float16" else 1.0}
        difference = float((found - wanted).abs().max() / wanted.abs().max())
        assert 0 < difference < tolerance


def test_one_autocast_context_around_all_updates_computes_with_new_weights():
    """torch keeps casts of the weights until the context ends."""

    def train(*, around):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        ours = sgd_accumulator(model, precision="bfloat16")
        of_all = ours.precision.forward() if around else nullcontext()
        losses = []
        with of_all:
            for _ in range(3):
                for _ in range(2):
                    with nullcontext() if around else ours.precision.forward():
                        total = model(torch.ones(3, 4)).float().square().sum()
                    ours.backward(Loss(total, 3))
                losses.append(ours.boundary().loss)
        return losses

    assert train(around=True) == train(around=False)


def test_the_scale_changes_no_bit_of_a_float32_forward():
    """It is a power of two; so only where the forward is float16 can the result differ."""

    def train(scale):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        ours = sgd_accumulator(model, precision="float16")
        ours.precision.load({"scale": scale, "calm": 0})
        ours.backward(Loss(model(torch.ones(3, 4)).square().sum(), 3), last=True)
        ours.boundary()
        return model.weight.detach()

    assert torch.equal(train(1.0), train(FIRST_SCALE))


@pytest.mark.parametrize("shard", [False, True])
def test_an_overflow_on_one_rank_skips_the_window_on_all_and_halves_the_scale(shard):
    def trained(**more):
        given = {"precision": "float16", "shard_optimizer": shard, **more}
        return run_in_threads(2, lambda group: _train(group, **given))

    clean, _ = trained(updates=1)[0]
    for found, _ in trained(updates=2, boom=(1, 1)):
        assert torch.equal(found, clean)
    results = trained(boom=(1, 1))
    for found, reports in results:
        assert torch.equal(found, results[0][0])
        assert [report.applied for report in reports] == [True, False, True]
        scales = [report.loss_scale for report in reports]
        assert scales == [FIRST_SCALE, FIRST_SCALE, FIRST_SCALE / 2]
        assert math.isfinite(reports[1].loss)
        sent = [report.collectives for report in reports]
        assert (sent[1] < sent[2]) is shard, "no shards of weights travel"


@given(st.integers(0, 2**64 - 1))
def test_seeding_gives_the_numbers_that_torchs_own_way_gives(seed):
    torch.manual_seed(seed)
    wanted = torch.rand(5)
    seed_torch(seed)
    assert torch.equal(torch.rand(5), wanted)
