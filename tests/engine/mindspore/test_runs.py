"""Whole runs of MindSpore jobs, as a user starts them."""

import json
import os
import signal
import time

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from tests import helpers

LINE = (
    "job=line", "cluster.nodes=2", "cluster.ranks_per_node=1", "tracker=none", "train.epochs=null",
    "train.updates=600", "train.checkpoint_every=50", "train.evaluate_every=0",
)  # fmt: skip


def rank_logs(run):
    return sorted((run / "logs").glob("rank-*.log"))


def test_line_recovers_slope_and_intercept(tmp_path):
    run = tmp_path / "run"
    done = helpers.call("job=line", f"run.dir={run}")
    assert done.returncode == 0, done.stdout + done.stderr
    result = helpers.result(run)
    assert abs(result["metrics"]["slope"] - 2) < 0.02
    assert abs(result["metrics"]["intercept"] - 3) < 0.02
    plan = json.loads((run / "plan.json").read_text())
    assert all(r["collectives"] == plan["collectives_per_update"] for r in helpers.records(run))
    assert helpers.records(run)[0]["compile_s"] > 0
    assert "compile_s" not in helpers.records(run)[-1]


@pytest.mark.timeout(400)
def test_eight_workers_on_two_nodes_learn_digits_with_a_log_each(tmp_path):
    run = tmp_path / "run"
    shape = (
        "cluster.nodes=2",
        "cluster.ranks_per_node=4",
        "tracker=none",
        "train.evaluate_every=0",
    )
    done = helpers.call("job=digits_mindspore", *shape, f"run.dir={run}", timeout=390)
    assert done.returncode == 0, done.stdout + done.stderr
    assert helpers.result(run)["metrics"]["accuracy"] >= 0.9
    assert len(rank_logs(run)) == 8
    for log in rank_logs(run):
        text = log.read_text()
        assert "micro-step 100: loss" in text
        assert "micro-step 200: loss" in text


def test_both_engines_agree_from_the_same_start(tmp_path):
    layers, draw = [784, 48, 10], np.random.default_rng(0)
    start = tmp_path / "start.safetensors"
    save_file(
        {
            "0.weight": (draw.standard_normal((48, 784)) / 28).astype(np.float32),
            "0.bias": np.zeros(48, np.float32),
            "2.weight": (draw.standard_normal((10, 48)) / 7).astype(np.float32),
            "2.bias": np.zeros(10, np.float32),
        },
        start,
    )
    common = (
        f"job.initial_weights={start}", f"job.layers={layers}", "cluster.nodes=1",
        "cluster.ranks_per_node=2", "tracker=none", "train.epochs=null", "train.updates=10",
        "train.evaluate_every=0", "accumulation.steps=4", "accumulation.global_batch=150",
        "accumulation.micro_batch=null", "schedule.base_lr=0.05", "schedule.scaling=none",
        "optimizer.momentum=0.0",
    )  # fmt: skip
    jobs = {
        "torch": ("job._target_=tests.engine.mindspore.twins.TorchTwin", "optimizer=sgd"),
        "mindspore": ("job=digits_mindspore",),
    }
    for name, job in jobs.items():
        done = helpers.call(*job, *common, f"run.dir={tmp_path / name}")
        assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = (
        load_file(next((tmp_path / name / "checkpoints").glob("*/weights.safetensors")))
        for name in ("mindspore", "torch")
    )
    for name, array in theirs.items():
        assert np.abs(ours[name] - array).max() <= 1e-5 * np.abs(array).max()
    table = helpers.verb("compare", tmp_path / "torch", tmp_path / "mindspore")
    assert table.returncode == 0, table.stdout + table.stderr


def victim_of(run, which):
    if which != "scheduler":
        return helpers.rank_pid(run, which)
    children = psutil.Process(helpers.rank_pid(run, 0)).children()
    return next(c.pid for c in children if "scheduler_process.py" in " ".join(c.cmdline()))


@pytest.mark.timeout(300)
def test_killed_processes_are_named_within_five_seconds_and_cost_no_bit(tmp_path):
    """A worker, rank 0 and the scheduler's process, one after the other, in one run."""
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    done = helpers.call(*LINE, f"run.dir={undisturbed}")
    assert done.returncode == 0, done.stdout + done.stderr
    process = helpers.begin(*LINE, f"run.dir={run}", "run.max_restarts=3")
    words = {1: "rank 1 on node1", 0: "rank 0 on node0", "scheduler": "MindSpore's scheduler"}
    for attempt, which in enumerate(words):
        helpers.until(
            lambda n=attempt: len([r for r in helpers.records(run) if r["attempt"] == n]) > 60,
            what="training",
        )
        doomed = helpers.processes_of(run)
        began = time.monotonic()
        os.kill(victim_of(run, which), signal.SIGKILL)
        next_one = run / "attempts" / f"{attempt + 1:03d}"
        helpers.until(next_one.exists, 10, f"the next attempt after {which}")
        assert time.monotonic() - began < 5, which
        left = [p for p in doomed if p.is_running() and "worker" in " ".join(p.cmdline())]
        assert not left, which
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert not helpers.processes_of(run)
    found = helpers.result(run)
    assert len(found["restarts"]) == len(words)
    for note, word in zip(found["restarts"], words.values(), strict=True):
        assert word in note["why"]
        assert note["resumed_from"] > 0
    assert found["weights_sha256"] == helpers.result(undisturbed)["weights_sha256"]


def test_one_signal_stops_all_ranks_at_a_boundary(tmp_path):
    run = tmp_path / "run"
    process = helpers.begin(*LINE, f"run.dir={run}")
    helpers.until(lambda: len(helpers.records(run)) > 5, what="training")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 3, output
    assert helpers.result(run)["state"] == "stopped"
    assert not helpers.processes_of(run)
