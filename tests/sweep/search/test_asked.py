"""What a search cannot do is said before its first trial, each thing in one sentence."""

import pytest

from orchestrator.config.command_line import CommandLine
from orchestrator.config.composer import Composer, compose
from orchestrator.errors import ConfigError
from tests.helpers import TINY
from tests.sweep.search.helpers import search_of

LR = "schedule.base_lr=interval(0.001,0.1)"


TPE = "sweep.search=tpe sweep.trials=5 "


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("sweep.search=tpe", "sweep.trials=20"),
        ("sweep.search=tpe sweep.trials=0", "sweep.trials must be at least 1"),
        ("sweep.search=tpee sweep.trials=5", "did you mean 'tpe'"),
        ("sweep.search=grid", "schedule.base_lr has them without end"),
        (f"{TPE}sweep.seed=-1", "sweep.seed must be at least 0"),
        (f"{TPE}sweep.prune=worst", "none, median"),
        (f"{TPE}sweep.objective=accuracy", "sweep.direction=minimize"),
        (f"{TPE}sweep.objective=seconds sweep.prune=median", "at the end"),
        (f"{TPE}sweep.parallel=0", "from 1 to 10000"),
        (f"{TPE}accumulation.steps=1,0", "no trial can have accumulation.steps=0"),
        (f"{TPE}optimizer=sgd,sdg", "no trial can have optimizer=sdg"),
        (f"{TPE}sweep.seed=5,6", "cannot be swept"),
        (f"{TPE}train.updtes=3", "did you mean"),
    ],
)
def test_what_cannot_be_searched_is_refused(line, why):
    with pytest.raises(ConfigError) as refused:
        search_of(TINY, "tracker=none", LR, *line.split())
    assert why in str(refused.value)
    assert len(str(refused.value).splitlines()) <= 2


@pytest.mark.parametrize("stated", ["trials=3", "seed=2", "direction=maximize", "prune=median"])
def test_what_a_search_has_is_refused_without_one(stated):
    with pytest.raises(ConfigError, match=r"has no effect without a search"):
        compose([TINY, f"sweep.{stated}"])


def test_a_search_needs_a_sweep_and_is_the_only_one():
    with pytest.raises(ConfigError, match="so it needs -m"):
        compose([TINY, "sweep.search=tpe", "sweep.trials=3"])
    with pytest.raises(ConfigError, match="means nothing here"):
        search_of(TINY, LR, "sweep.search=tpe", "sweep.trials=3", "hydra.sweeper._target_=a.B")


def test_a_value_counts_as_one_that_can_be_where_any_of_the_others_goes_with_it():
    found = search_of(
        TINY, "sweep.search=random", "sweep.trials=3", "accumulation.reduction=fast,reproducible",
        "accumulation.micro_batch=null,8",
    )  # fmt: skip
    assert found.trials == 3, "reproducible goes with a micro_batch"


def folder_of(*overrides):
    composer = Composer(CommandLine(overrides=(TINY, *overrides), multirun=True))
    return composer.loader.sweep_name(composer.overrides, composer.line)


def test_a_search_is_named_by_all_that_makes_it_one():
    base = ("sweep.search=tpe", "sweep.trials=3", LR)
    name = folder_of(*base)
    assert folder_of("sweep.search=tpe", "sweep.trials=9", "sweep.parallel=2", LR) == name
    assert folder_of(*base, "sweep.seed=1") != name
    assert folder_of(*base[:2], "schedule.base_lr=interval(0.001,0.2)") != name
