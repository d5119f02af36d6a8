"""Optimizers are built as they are spelled, and every group keeps its share of the rate."""

import pytest
import torch
from torch import nn

from orchestrator.engine.torch.optimizers import LearningRate, build_optimizer
from orchestrator.errors import ConfigError, JobError

MODEL = nn.Linear(2, 2)


def names(parameters, lr):
    """Not an optimizer."""
    return {"parameters": parameters, "lr": lr}


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"name": "sgd", "momentum": 0.9, "weight_decay": 0.0}, torch.optim.SGD),
        ({"name": "adam", "betas": [0.9, 0.99]}, torch.optim.Adam),
        ({"name": "adamw", "weight_decay": 0.1}, torch.optim.AdamW),
        ({"_target_": "torch.optim.RMSprop", "alpha": 0.9}, torch.optim.RMSprop),
        ({"name": "mine", "_target_": "torch.optim.Adagrad"}, torch.optim.Adagrad),
    ],
)
def test_optimizers_are_built_by_name_or_dotted_name(settings, kind):
    optimizer = build_optimizer(MODEL, settings)
    assert type(optimizer) is kind
    for key, value in settings.items():
        if key not in ("name", "_target_"):
            assert optimizer.defaults[key] in (value, tuple(value) if key == "betas" else value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "adamm"}, "there is no optimizer.name=adamm; did you mean 'adam"),
        ({}, "there is no optimizer.name=None; known are: adam, adamw, sgd"),
        ({"name": "sgd", "momentun": 0.9}, "takes no 'momentun'; did you mean 'momentum'"),
        ({"name": "sgd", "lr": 0.1}, "set schedule.base_lr=0.1"),
        ({"name": "adam", "betas": [2.0, 0.9]}, "cannot be built: Invalid beta"),
        ({"_target_": "torch.optim.AdmW"}, "no 'AdmW' in torch.optim; did you mean 'AdamW'"),
        ({"_target_": "nowhere.Adam"}, "No module named 'nowhere'"),
        ({"_target_": "torch.nn.Linear", "bias": False}, "cannot be built"),
        ({"_target_": "builtins.print"}, "cannot be built"),
        ({"_target_": "types.SimpleNamespace"}, "cannot be built"),
        ({"_target_": "tests.engine.torch.test_optimizers.names"}, "gives a dict, not a torch"),
        ({"_target_": "torch.optim.LBFGS"}, "needs a closure"),
    ],
)
def test_what_is_misspelled_or_cannot_be_used_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        build_optimizer(MODEL, settings)


def test_by_name_the_step_is_one_kernel_unless_something_else_is_asked_for():
    for name in ("sgd", "adam", "adamw"):
        assert build_optimizer(MODEL, {"name": name}).defaults["fused"] is True
    assert build_optimizer(MODEL, {"name": "adam", "foreach": True}).defaults["fused"] is None
    assert build_optimizer(MODEL, {"name": "adam", "fused": False}).defaults["fused"] is False
    assert build_optimizer(MODEL, {"_target_": "torch.optim.Adam"}).defaults["fused"] is None
    turned = nn.Linear(2, 2, dtype=torch.complex64)  # torch has no fused kernel for these
    assert build_optimizer(turned, {"name": "adam"}).defaults["fused"] is None


def test_frozen_parameters_are_left_out():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(requires_grad=False)
    [group] = build_optimizer(model, {"name": "sgd"}).param_groups
    assert [id(p) for p in group["params"]] == [id(model.weight)]


def test_groups_keep_their_ratio_to_the_base_rate():
    optimizer = torch.optim.AdamW(
        [{"params": [MODEL.weight], "lr": 1e-4}, {"params": [MODEL.bias]}], lr=1e-3
    )
    rate = LearningRate(optimizer)
    for value in (0.5, 0.02):
        rate.set(value)
        assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([value / 10, value])


def test_rates_that_are_tensors_are_changed_in_place():
    tensor = torch.tensor(1.0)
    optimizer = torch.optim.Adam([MODEL.weight], lr=tensor, foreach=False)
    LearningRate(optimizer).set(0.25)
    assert optimizer.param_groups[0]["lr"] is tensor
    assert tensor.item() == 0.25


def test_an_optimizer_without_a_base_rate_is_refused():
    with pytest.raises(JobError, match="was built without a learning rate"):
        LearningRate(torch.optim.SGD([MODEL.weight], lr=0.0)).set(0.1)
