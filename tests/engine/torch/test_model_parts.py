"""Ranks that hold parts of one model decide and clip by the whole model."""

import math

import pytest
import torch
from torch import nn

from orchestrator.engine.torch.transports import TorchGroup
from orchestrator.errors import ConfigError, JobError, NonFiniteError
from orchestrator.job import Loss
from orchestrator.local_ranks.threads import run_in_threads
from tests.engine.torch.jobs import numbers_of, sgd_accumulator

X = torch.arange(12, dtype=torch.float64).reshape(4, 3)


def _part(number):
    torch.manual_seed(number)
    return nn.Linear(3, 2 + number, dtype=torch.float64)


def _train(parts, group, model_group=None, *, scales=(1.0, 1.0), weight=4, **options):
    """Train these parts of a model whose loss is the sum of its parts'; return (reports, model)."""
    model = nn.ModuleList([_part(number) for number in parts])
    accumulator = sgd_accumulator(model, group, model_group=model_group, **options)
    reports = []
    for _ in range(3):
        total = sum((part(X) ** 2).sum() * scales[n] for n, part in zip(parts, model, strict=True))
        accumulator.backward(Loss(total, weight), last=True)
        reports.append(accumulator.boundary())
    return reports, model


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.5}, {"reduction": "reproducible"}])
def test_parts_of_a_model_report_and_clip_as_the_whole_model(options):
    wanted, whole = _train([0, 1], TorchGroup.alone(), **options)

    def train(group):
        return _train([group.rank], TorchGroup.alone(), group, **options)

    parts = run_in_threads(2, train)
    weights = torch.cat([numbers_of(model) for _, model in parts])
    torch.testing.assert_close(weights, numbers_of(whole), rtol=1e-12, atol=0)
    for reports, _ in parts:
        for report, one in zip(reports, wanted, strict=True):
            assert report.loss == pytest.approx(one.loss, rel=1e-12)
            assert report.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-12)
            assert report.collectives == 1, "the gather between the parts"
            assert report.bytes_on_wire > 0


def test_all_parts_skip_or_refuse_a_loss_that_is_not_finite_in_one():
    def train(group, **options):
        return _train([group.rank], TorchGroup.alone(), group, scales=(1.0, math.nan), **options)

    def skip(group):
        reports, _ = train(group, on_non_finite="skip")
        return [report.applied for report in reports]

    def stop(group):
        with pytest.raises(NonFiniteError) as caught:
            train(group)
        return str(caught.value)

    assert run_in_threads(2, skip) == [[False] * 3] * 2
    first, second = run_in_threads(2, stop)
    assert "first on another part of the model" in first
    assert "first on rank 0, micro-step 0" in second


def test_parts_that_count_other_weights_are_refused_on_all():
    def train(group):
        with pytest.raises(JobError, match=r"different weights in update 0: 4, 5"):
            _train([group.rank], TorchGroup.alone(), group, weight=4 + group.rank)
        return True

    assert all(run_in_threads(2, train))


def test_parts_with_other_options_are_refused_on_all():
    def train(group):
        with pytest.raises(ConfigError, match=r"same clip_norm.*'clip_norm': 1.0"):
            _train([group.rank], TorchGroup.alone(), group, clip_norm=1.0 + group.rank)
        with pytest.raises(ConfigError, match="model_group must be a TorchGroup"):
            _train([group.rank], TorchGroup.alone(), "stages")
        return True

    assert all(run_in_threads(2, train))
