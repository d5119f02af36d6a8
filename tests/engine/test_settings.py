"""Options of an accumulator as one value, and an engine's settings, which are that and more."""

import pytest
import torch

from orchestrator.config.reading import read_config
from orchestrator.engine.settings import AccumulationOptions, EngineSettings
from orchestrator.engine.torch import Accumulator, TorchGroup
from orchestrator.errors import ConfigError
from orchestrator.job import Job
from orchestrator.rank.setup import engine_settings


def _built(*options, **keywords):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Accumulator(model, optimizer, TorchGroup.alone(), *options, **keywords)


def test_a_name_given_beside_the_options_wins():
    options = AccumulationOptions(clip_norm=1.0, on_non_finite="skip")
    chosen = _built(options, clip_norm=2.0).options
    assert (chosen.clip_norm, chosen.on_non_finite) == (2.0, "skip")
    assert options.clip_norm == 1.0
    assert _built().options == AccumulationOptions()


def test_a_name_that_is_none_is_answered_with_the_nearest():
    with pytest.raises(TypeError, match=r"no option 'clip_nrm'.*; did you mean 'clip_norm'"):
        _built(clip_nrm=1.0)


def test_options_are_checked_as_keywords_are():
    with pytest.raises(ConfigError, match="clip_norm must be a number above 0"):
        _built(AccumulationOptions(clip_norm=0.0))


def test_what_of_the_configuration_an_engine_needs_reaches_it():
    changed = {
        "job": {"_target_": "jobs.digits.Digits"},
        "train": {"precision": "float64", "clip_norm": 2.0, "seed": 5, "on_non_finite": "skip"},
        "accumulation": {"reduction": "reproducible", "micro_batch": 8},
        "engine": {"norm": "group", "mode": "pynative"},
    }
    settings = engine_settings(read_config(changed), Job())
    wanted = EngineSettings(
        seed=5, precision="float64", clip_norm=2.0, on_non_finite="skip",
        reduction="reproducible", leaf_size=8, norm="group", mode="pynative",
        optimizer=settings.optimizer, bucket_bytes=settings.bucket_bytes,
        loader_workers=settings.loader_workers,
    )  # fmt: skip
    assert settings == wanted
