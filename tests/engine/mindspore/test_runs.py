"""Whole runs of MindSpore jobs, as a user starts them."""

import json
import subprocess
import sys

import pytest

from tests import helpers
from tests.docs.scripts import shell_block


def rank_logs(run):
    return sorted((run / "logs").glob("rank-*.log"))


def test_line_recovers_slope_and_intercept(tmp_path):
    run = tmp_path / "run"
    done = helpers.call("job=line", helpers.SMALL, f"run.dir={run}")
    assert done.returncode == 0, done.stdout + done.stderr
    result = helpers.result(run)
    assert abs(result["metrics"]["slope"] - 2) < 0.02
    assert abs(result["metrics"]["intercept"] - 3) < 0.02
    plan = json.loads((run / "plan.json").read_text())
    assert all(r["collectives"] == plan["collectives_per_update"] for r in helpers.records(run))
    assert helpers.records(run)[0]["compile_s"] > 0
    assert "compile_s" not in helpers.records(run)[-1]


@pytest.mark.timeout(600)
def test_eight_workers_on_two_nodes_learn_digits_with_a_log_each(tmp_path):
    run = tmp_path / "run"
    # Fewer, larger updates of a narrower net than the job's own: eight ranks share two cores.
    shape = (
        "cluster.nodes=2", "cluster.ranks_per_node=4", "tracker=none", "train.evaluate_every=0",
        "job.layers=[784,64,10]", "accumulation.steps=8",
    )  # fmt: skip
    done = helpers.call("job=digits_mindspore", *shape, f"run.dir={run}", timeout=590)
    assert done.returncode == 0, done.stdout + done.stderr
    assert helpers.result(run)["metrics"]["accuracy"] >= 0.9
    assert len(rank_logs(run)) == 8


@pytest.mark.timeout(400)
def test_both_engines_agree_from_the_same_start(tmp_path):
    """The block of docs/how-to/mindspore.md, with a narrower net."""
    block = shell_block("mindspore.md", "orchestrator compare")
    assert "layers=[784,512,512,10]" in block
    commands = block.replace("784,512,512,10", "784,48,10").replace("python -m", "$PYTHON -m")
    done = subprocess.run(
        ["bash", "-eu", "-c", commands],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=390,
        env=helpers.environment(PYTHON=sys.executable),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    torchs, ours = tmp_path / "runs" / "torch", tmp_path / "runs" / "mindspore"
    assert "torch" in json.loads((torchs / "environment.json").read_text())["framework"]
    assert "mindspore" in json.loads((ours / "environment.json").read_text())["framework"]
    assert [r["update"] for r in helpers.records(ours)] == list(range(10))
    assert all(r["micro_steps"] == 4 for r in helpers.records(ours))
    found = helpers.compare(ours, torchs)
    assert 0 < found["max_relative_difference"] <= 1e-5
    start = tmp_path / "runs" / "start"
    told = helpers.verb("compare", ours, start, "--at-most", "1e-5")
    assert told.returncode == 1
    assert "more than --at-most 1e-05" in told.stderr
