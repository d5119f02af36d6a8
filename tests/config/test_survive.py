"""What `run.survive=true` cannot be had with is refused before anything starts, with a way out."""

import pytest

from orchestrator.config.rules import check, refuse_unsupported
from orchestrator.config.schema import Config
from orchestrator.errors import ConfigError


def config(**values):
    made = Config(job={"_target_": "tests.tiny_job.Tiny"}, optimizer={"name": "adam"})
    made.run.survive = True
    for dotted, value in values.items():
        section, _, name = dotted.rpartition("__")
        setattr(getattr(made, section) if section else made, name, value)
    return made


def refuse(made, framework):
    check(made)
    refuse_unsupported(made, framework)


@pytest.mark.parametrize(
    ("values", "framework", "said"),
    [
        ({}, "mindspore", "run.max_restarts=3"),
        ({"transport": "nccl"}, "torch", "transport=gloo"),
        ({"engine__norm": "exact"}, "torch", "engine.norm=group"),
        ({"job": {"command": ["train.py"]}}, None, "means nothing to a program"),
        (
            {"cluster__kind": "slurm", "cluster__allocation": "current"},
            "torch",
            "leave one of them",
        ),
        ({"cluster__kind": "slurm", "cluster__gpus_per_node": "a100:4"}, "torch", "transport=gloo"),
        ({"cluster__nodes": 1, "cluster__ranks_per_node": 1}, "torch", "cluster.ranks_per_node=2"),
        ({"cluster__kind": "elsewhere"}, "torch", "not available on a elsewhere cluster"),
    ],
)
def test_what_cannot_survive_is_refused_with_what_can_be_done(values, framework, said):
    with pytest.raises(ConfigError, match=said) as refused:
        refuse(config(**values), framework)
    assert "run.survive=true" in str(refused.value)


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_what_can_survive_is_let_through(kind):
    refuse(config(cluster__kind=kind), "torch")
