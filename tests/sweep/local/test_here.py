"""How many points of a sweep run here at once: one, where their speeds are compared."""

import io

import pytest
from rich.console import Console

from orchestrator.cli.follow import OutputOptions
from orchestrator.config.composer import compose
from orchestrator.sweep.local import most_at_once


def most(key, values, *more):
    console = Console(file=io.StringIO(), width=200)
    configs = [compose([f"{key}={value}", *more]) for value in values]
    return most_at_once(configs, OutputOptions(console=console)), console.file.getvalue()


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("accumulation.steps", (1, 2)),
        ("cluster.ranks_per_node", (1, 2)),
        ("engine.shard_optimizer", (False, True)),
        ("transport", ("auto", "gloo")),
    ],
)
def test_points_whose_speeds_are_compared_run_one_after_another_which_is_said(key, values):
    found, said = most(key, values)
    assert found == 1
    assert f"they differ in {key.partition('.')[0]}" in said
    assert most(key, values, "sweep.parallel=2") == (2, "")


def test_other_points_run_as_many_at_once_as_there_is_room_for():
    assert most("train.seed", (1, 2, 3)) == (None, "")
    assert most("train.seed", (1,)) == (None, "")
