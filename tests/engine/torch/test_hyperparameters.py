"""An optimizer's hyperparameters belong to the run: what changes them elsewhere is refused."""

import pytest
import torch

from orchestrator.engine.settings import EngineSettings
from orchestrator.engine.torch import TorchGroup, build_engine
from orchestrator.errors import JobError
from orchestrator.plan.split import assign
from tests.engine.torch.test_engine import Curve, _run, _windows


class Schedules(Curve):
    """Holds its optimizer, and does something to it at some moment."""

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
    (_set("weight_decay", 0.3), "weight_decay of the optimizer's parameter group 0 was changed"),
    (_set("betas", (0.8, 0.9), 1), "betas of the optimizer's parameter group 1 was changed"),
    (_one_more_group, "had 2 parameter groups and has 3 now"),
]
MOMENTS = {
    "loss": "inside a window",
    "after_update": "in after_update of update 0",
    "evaluate": "before update 1",
}


def _trained(job):
    engine = build_engine(
        job, EngineSettings(metric_names=Curve.metric_names, optimizer={}), TorchGroup.alone()
    )
    first, second = _windows(assign([29], steps=1), 0, updates=2)
    _run(engine, [first])
    engine.evaluate()
    _run(engine, [second])
    return engine


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("change", "told"), CHANGES)
def test_a_change_behind_the_engines_back_is_refused_with_its_moment(change, told, moment):
    if moment == "after_update" and told.startswith(("weight_decay", "betas")):
        return  # the job's turn: see below
    with pytest.raises(JobError) as refused:
        _trained(Schedules(moment, change))
    assert told in str(refused.value)
    assert MOMENTS[moment] in str(refused.value)


def test_an_optimizer_that_is_left_alone_keeps_its_ratios():
    built = _trained(Schedules("never", None)).accumulator.optimizer
    rates = [group["lr"] for group in built.param_groups]
    assert rates == pytest.approx([0.1 * 0.05, 0.05])


def test_a_scheduler_on_the_optimizer_is_refused_before_training():
    with pytest.raises(JobError, match=r"Schedules\.optimizer has a learning-rate scheduler"):
        _trained(Schedules("never", None, scheduled=True))


@pytest.mark.parametrize(("name", "value"), [("weight_decay", 0.3), ("betas", (0.8, 0.9))])
def test_after_update_may_change_all_but_the_rates(name, value):
    """JEPA's weight decay rises with the updates."""
    built = _trained(Schedules("after_update", _set(name, value))).accumulator.optimizer
    assert built.param_groups[0][name] == value
