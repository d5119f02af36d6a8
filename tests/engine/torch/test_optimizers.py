"""Optimizers and their hyperparameters."""

import pytest
import torch
from torch import nn

from orchestrator.engine.torch.model import build_optimizer, learning_rate_of
from orchestrator.errors import ConfigError, JobError
from tests.engine.torch.jobs import SAMPLES, Curve, engine_of
from tests.engine.windows import make_window, run
from tests.refusals import refused

MODEL = nn.Linear(2, 2)


def names(parameters, lr):
    return {"parameters": parameters, "lr": lr}


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"name": "sgd", "momentum": 0.9, "weight_decay": 0.0}, torch.optim.SGD),
        ({"name": "adam", "betas": [0.9, 0.99]}, torch.optim.Adam),
        ({"name": "adamw", "weight_decay": 0.1}, torch.optim.AdamW),
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
    ("settings", "names"),
    [
        ({"name": "sgd", "momentun": 0.9}, "momentun"),
        ({"name": "adam", "betas": [2.0, 0.9]}, "Invalid beta"),
        ({"_target_": "torch.optim.AdmW"}, "torch.optim.AdmW"),
        ({"_target_": "nowhere.Adam"}, "'nowhere'"),
        ({"_target_": "builtins.print"}, "builtins.print"),
        ({"_target_": "tests.engine.torch.test_optimizers.names"}, "dict"),
        ({"_target_": "torch.optim.LBFGS"}, "closure"),
        ({"_target_": "torch.optim.SparseAdam"}, "sparse"),
    ],
)
def test_misspelled_or_unusable_settings_are_refused(settings, names):
    with refused(ConfigError, names):
        build_optimizer(MODEL, settings)


def test_adam_by_name_is_fused_by_default():
    for name, fused in (("adam", True), ("adamw", True), ("sgd", None)):
        assert build_optimizer(MODEL, {"name": name}).defaults["fused"] is fused
    assert build_optimizer(MODEL, {"name": "adam", "foreach": True}).defaults["fused"] is None
    assert build_optimizer(MODEL, {"name": "adam", "fused": False}).defaults["fused"] is False
    assert build_optimizer(MODEL, {"_target_": "torch.optim.Adam"}).defaults["fused"] is None
    turned = nn.Linear(2, 2, dtype=torch.complex64)  # torch has no fused kernel for these
    rows = nn.ParameterList([torch.ones(4, 2)[::2]])  # one would step the numbers between, too
    for model in (turned, rows):
        assert build_optimizer(model, {"name": "adam"}).defaults["fused"] is None


def test_frozen_parameters_are_left_out():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(requires_grad=False)
    [group] = build_optimizer(model, {"name": "sgd"}).param_groups
    assert [id(p) for p in group["params"]] == [id(model.weight)]


def test_groups_keep_their_ratio_to_the_base_rate():
    optimizer = torch.optim.AdamW(
        [{"params": [MODEL.weight], "lr": 1e-4}, {"params": [MODEL.bias]}], lr=1e-3
    )
    rate = learning_rate_of(optimizer)
    for value in (0.5, 0.02):
        rate.set(value)
        assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([value / 10, value])


def test_rates_that_are_tensors_are_changed_in_place():
    tensor = torch.tensor(1.0)
    optimizer = torch.optim.Adam([MODEL.weight], lr=tensor, foreach=False)
    learning_rate_of(optimizer).set(0.25)
    assert optimizer.param_groups[0]["lr"] is tensor
    assert tensor.item() == 0.25


def test_an_optimizer_without_a_base_rate_is_refused():
    with pytest.raises(JobError, match="was built without a learning rate"):
        learning_rate_of(torch.optim.SGD([MODEL.weight], lr=0.0)).set(0.1)


# ------------------------------------------------------------------ Hyperparameters


class Schedules(Curve):
    def __init__(self, moment, change, scheduled=False):
        super().__init__()
        self.moment, self.change, self.scheduled = moment, change, scheduled

    def optimizer(self, model):
        first, *rest = model.parameters()
        self.built = torch.optim.AdamW([{"params": [first], "lr": 0.1}, {"params": rest}], lr=1.0)
        if self.scheduled:
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.built, 1)
        return self.built

    def _at(self, moment):
        if self.moment == moment:
            self.change(self.built)

    def loss(self, model, batch):
        if torch.is_grad_enabled() and model.training:
            self._at("loss")
        return super().loss(model, batch)

    def after_update(self, model, update):
        self._at("after_update")

    def evaluate(self, model):
        self._at("evaluate")
        return super().evaluate(model)


def _set(name, value, group=0):
    def change(optimizer):
        optimizer.param_groups[group][name] = value

    return change


def _one_more_group(optimizer):
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})


RATE = "Let the job define learning_rate(self, update)"
CHANGES = [
    (_set("lr", 0.5), "lr of the optimizer's parameter group 0 was changed from"),
    (_set("lr", 0.5, 1), RATE),
    (_one_more_group, "had 2 parameter groups and has"),
]
MOMENTS = {
    "loss": "inside a window",
    "after_update": "in after_update of update 0",
    "evaluate": "before update 1",
}


def _trained(job):
    engine = engine_of(job, optimizer={})
    run(engine, [make_window(0, [(0, SAMPLES)])])
    engine.evaluate()
    run(engine, [make_window(1, [(0, SAMPLES)])])
    return engine


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_change_behind_the_engines_back_is_refused(change, message, moment):
    with pytest.raises(JobError) as refused:
        _trained(Schedules(moment, change))
    assert message in str(refused.value)
    assert MOMENTS[moment] in str(refused.value)


def test_a_scheduler_on_the_optimizer_is_refused_before_training():
    with refused(JobError, "Schedules.optimizer scheduler"):
        _trained(Schedules("never", None, scheduled=True))


@pytest.mark.parametrize("moment", ["after_update", "evaluate"])
@pytest.mark.parametrize(("name", "value"), [("weight_decay", 0.3), ("betas", (0.8, 0.9))])
def test_between_windows_all_but_the_rates_may_change(name, value, moment):
    """JEPA's weight decay rises with the updates."""
    built = _trained(Schedules(moment, _set(name, value))).accumulator.optimizer
    assert built.param_groups[0][name] == value
