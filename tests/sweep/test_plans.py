"""The plan of a sweep is that of each of its points, whoever asked for the sweep."""

import json

import pytest
from typer.testing import CliRunner

from orchestrator.__main__ import app
from orchestrator.cli.start import prepare, with_notes
from orchestrator.config.composer import compose


def planned(*arguments):
    done = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "100"})
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(
    ("asked", "points"),
    [(["-m", "cluster.nodes=1,3", "accumulation.steps=2"], 2), (["-m", "train.updates=5"], 1)],
)
def test_each_point_of_a_sweep_has_the_plan_that_it_has_alone(asked, points):
    found = json.loads(planned(*asked, "--json"))
    assert len({str(plan["overrides"]) for plan in found}) == points
    for plan in found:
        config = compose(plan.pop("overrides"))
        alone = with_notes(prepare(config), config)
        assert plan.pop("cell")["do"] == "to run"
        assert plan == json.loads(json.dumps(alone))
    words = planned(*asked)
    for number in range(points):
        assert f"point {number}: " in words


def test_a_plan_without_a_sweep_is_one_and_a_point_that_cannot_be_is_named():
    assert json.loads(planned("train.updates=5", "--json"))["updates"] == 5
    assert "point 0" not in planned("train.updates=5")
    done = CliRunner().invoke(app, ["plan", "-m", "cluster.nodes=1,0"])
    assert done.exit_code == 2
    assert "point 1: cluster.nodes must be at least 1" in done.output
