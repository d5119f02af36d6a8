"""Three third-party packages train together: a cluster, a transport and a tracker."""

import json
import os

import pytest

from tests.helpers import ROOT, TINY, call, records, result

pytestmark = pytest.mark.long


def lines_of(path):
    """Return the step and the values of each line that the toy tracker has written."""
    scalars = [json.loads(line) for line in path.read_text().splitlines()]
    return [(values.pop("step"), values) for values in scalars]


def test_a_run_that_is_placed_connected_and_tracked_by_all_three(target, tmp_path):
    run = tmp_path / "run"
    call(
        TINY,
        f"run.dir={run}",
        "cluster.kind=listed",
        "cluster.options.names=[ann,bob]",
        "cluster.ranks_per_node=1",
        "transport=mailbox",
        "tracker.kind=lines",
        "train.updates=4",
        "accumulation.global_batch=40",
        "accumulation.steps=2",
        PYTHONPATH=f"{target}{os.pathsep}{ROOT}",
        code=0,
    )
    assert (result(run)["state"], result(run)["updates"]) == ("finished", 4)
    assert json.loads((run / "environment.json").read_text())["transport"] == "mailbox"
    planned = json.loads((run / "plan.json").read_text())["collectives_per_update"]
    assert [record["collectives"] for record in records(run)] == [planned] * 4
    tracked = [
        (n, one["train/loss"]) for n, one in lines_of(run / "scalars.jsonl") if "train/loss" in one
    ]
    assert tracked == [(record["update"], record["loss"]) for record in records(run)]
