"""A job's own learning rates: a function of the update's number, the same whenever it is asked."""

import math

import pytest
import torch

from orchestrator.config.composer import compose
from orchestrator.config.optimizer import base_rate, described
from orchestrator.config.schema import ScheduleConfig
from orchestrator.errors import ConfigError, JobError
from orchestrator.plan.parts import JobFacts
from orchestrator.plan.plan import Plan
from orchestrator.trainer.same_inputs import own_rates
from tests.refusals import refused


class Alone:
    """All that is needed of an engine here."""

    def __init__(self, other=None):
        self.other = other

    def gather(self, numbers):
        return [list(numbers), self.other or list(numbers)]


class Waves:
    def __init__(self, function):
        self.function = function

    def learning_rate(self, update):
        return self.function(update)


def test_a_jobs_rates_take_the_place_of_the_schedule():
    rates = own_rates(Waves(lambda u: 0.1 / (1 + u)), ScheduleConfig(), Alone(), 10)
    assert [rates(update) for update in (0, 1, 9)] == [0.1, 0.05, 0.01]
    assert own_rates(object(), ScheduleConfig(base_lr=3.0), Alone(), 10) is None


drifting = iter(range(100))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda _: None, "learning_rate(0) must give a number, 0 or more, but gives None"),
        (lambda _: "fast", "but gives 'fast'"),
        (lambda _: -1e-3, "but gives -0.001"),
        (lambda u: math.nan if u == 9 else 1.0, "learning_rate(9) must give a number"),
        (lambda _: math.inf, "but gives inf"),
        (lambda _: next(drifting), "it must depend on the update's number alone"),
    ],
)
def test_what_is_no_function_of_the_update_is_refused(function, message):
    with pytest.raises(JobError) as refused:
        own_rates(Waves(function), ScheduleConfig(), Alone(), 10)
    assert "Waves.learning_rate" in str(refused.value)
    assert message in str(refused.value)


def test_a_rate_that_goes_wrong_later_is_refused_then():
    rates = own_rates(Waves(lambda u: 1 - u * (u == 7)), ScheduleConfig(), Alone(), 10)
    with refused(JobError, "Waves.learning_rate(7)"):
        rates(7)


def test_other_rates_on_another_rank_are_refused():
    with refused(JobError, "rank 1"):
        own_rates(Waves(lambda _: 1.0), ScheduleConfig(), Alone(other=[1.0, 1.0, 1.0, 2.0]), 10)


@pytest.mark.parametrize("stated", [{"base_lr": 0.1}, {"decay": "cosine", "warmup_updates": 3}])
def test_a_schedule_beside_a_jobs_rates_is_refused(stated):
    with pytest.raises(ConfigError) as refused:
        own_rates(Waves(lambda _: 1.0), ScheduleConfig(**stated), Alone(), 10)
    for name, value in stated.items():
        assert f"schedule.{name}={value}" in str(refused.value)


# ------------------------------------------------------------------ The base of an own optimizer


def adam(lr=None, **more):
    made = torch.optim.Adam([torch.zeros(1)], **({} if lr is None else {"lr": lr}))
    return described(made, more)


@pytest.mark.parametrize(
    ("optimizer", "stated", "expected"),
    [
        (adam(0.1), None, 0.1),
        (adam(0.1), 0.1, 0.1),
        (adam(torch.tensor(0.1)), 0.1, 0.1),
        (adam(1.0), 0.2, 0.2),  # relative to the schedule
        (adam(), 0.2, 0.2),  # the class's default is no statement
        (adam(), None, 1e-3),
        (adam(0.1, name="adam"), None, None),  # the configuration's leaves it to the schedule
    ],
)
def test_the_base_is_the_own_optimizers_rate_unless_one_is_stated(optimizer, stated, expected):
    assert base_rate(optimizer, stated, "Mine") == expected


def test_two_bases_that_disagree_are_refused():
    with refused(ConfigError, "schedule.base_lr=0.2 Mine.optimizer() lr=0.1"):
        base_rate(adam(0.1), 0.2, "Mine")


def test_the_plan_says_what_decides_the_rate():
    config = compose(["optimizer=null", "train.updates=2"])
    unknown = Plan.of(config, JobFacts()).to_json()
    known = Plan.of(config, JobFacts(base_rate=0.1)).to_json()
    assert unknown["learning_rate_first"] is None
    assert (known["learning_rate_from"], known["learning_rate_last"]) == ("optimizer", 0.1)
