"""`run.survive`: true is refused before the start with what excludes it, and a way out; unset, it
is on with several nodes where it is possible, and off with a reason elsewhere.
"""

import pytest

from orchestrator.config.rules import OFF, ON, check, planned_survival, refuse_unsupported
from orchestrator.config.schema import Config
from orchestrator.errors import ConfigError
from tests.refusals import refused

TINY, LIGHT = {"_target_": "tests.tiny_job.Tiny"}, {"_target_": "tests.light_job.Light"}


def config(*, survive=True, **values):
    made = Config(job=TINY, optimizer={"name": "adam"})
    made.run.survive = survive
    for dotted, value in values.items():
        section, _, name = dotted.rpartition("__")
        setattr(getattr(made, section) if section else made, name, value)
    return made


def refuse(made, framework):
    check(made)
    refuse_unsupported(made, framework)


@pytest.mark.parametrize(
    ("values", "framework", "names"),
    [
        ({"transport": "hccl"}, "torch", "transport=gloo"),
        ({"engine__shard_model": "all"}, "torch", "engine.shard_model=node"),
        ({"job": {"command": ["train.py"]}}, None, "run.max_restarts"),
        (
            {"cluster__kind": "slurm", "cluster__allocation": "current"},
            "torch",
            "cluster.allocation=current",
        ),
        ({"cluster__nodes": 1, "cluster__ranks_per_node": 1}, "torch", "cluster.ranks_per_node=2"),
    ],
)
def test_what_cannot_survive_is_refused(values, framework, names):
    with refused(ConfigError, f"run.survive=true {names}"):
        refuse(config(**values), framework)


def test_replacements_without_survive_are_refused():
    with refused(ConfigError, "run.max_replacements=3 run.survive=true"):
        refuse(config(run__max_replacements=3, run__survive=False), "torch")
    refuse(config(run__max_replacements=0, run__survive=False), "torch")
    refuse(config(run__max_replacements=3, cluster__kind="slurm"), "torch")


GPUS = {"cluster__kind": "slurm", "cluster__gpus_per_node": "a100:4"}


@pytest.mark.parametrize("values", [{}, {"cluster__kind": "slurm"}, {"transport": "nccl"}, GPUS])
def test_what_can_survive_is_let_through(values):
    refuse(config(**values), "torch")


REFUSED = (
    ({"transport": "nccl"}, "only if run.survive=true is stated"),
    (GPUS, "only if run.survive=true is stated"),
    ({"job": LIGHT}, "not available with numpy"),
    ({"job": {"_target_": "tests.tiny_job.Talking"}}, "talks_in_window"),
    ({"job": {"_target_": "tests.tiny_job.Hidden"}}, "does not say which framework"),
)


@pytest.mark.parametrize(("values", "said"), REFUSED)
def test_survival_is_off_where_impossible(values, said):
    on, reason = planned_survival(config(survive=None, **values))
    assert not on
    assert reason.startswith(OFF)
    assert said in reason


@pytest.mark.parametrize(
    ("values", "on"),
    [
        ({}, True),
        ({"cluster__kind": "slurm"}, True),
        ({"cluster__nodes": {"min": 1, "max": 2}}, True),
        ({"cluster__nodes": 2, "cluster__ranks_per_node": 1}, True),
        ({"cluster__nodes": 1}, False),
        ({"job": {"command": ["train.py"]}}, False),
    ],
)
def test_unset_it_is_on_with_more_than_one_node(values, on):
    made = config(survive=None, **values)
    assert planned_survival(made) == (on, ON * on)
    assert made.run.survive is None, "what was asked for is kept as it was"


@pytest.mark.parametrize("stated", [True, False])
def test_what_was_said_holds(stated):
    for values in ({}, {"cluster__nodes": 1}, {"engine__shard_optimizer": True}):
        assert planned_survival(config(survive=stated, **values)).on is stated
