"""Whole runs of MindSpore jobs that are killed, stopped, or go apart; with bounds on seconds."""

import os
import signal
import time

import psutil
import pytest

from tests import helpers

LINE = (
    "job=line", "cluster.nodes=2", "cluster.ranks_per_node=1", "tracker=none", "train.epochs=null",
    "train.updates=200", "train.checkpoint_every=10", "train.evaluate_every=0",
)  # fmt: skip


def victim_of(run, which):
    if which != "scheduler":
        return helpers.rank_pid(run, which)
    children = psutil.Process(helpers.rank_pid(run, 0)).children()
    return next(c.pid for c in children if "scheduler_process.py" in " ".join(c.cmdline()))


@pytest.mark.timeout(300)
def test_killed_processes_are_named_within_five_seconds_and_cost_no_bit(tmp_path):
    """A worker, rank 0 and the scheduler's process, one after the other, in one run."""
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    long = "train.updates=800"  # a fast machine does 200 before it hears of the last kill
    reference = helpers.begin(*LINE, long, f"run.dir={undisturbed}")
    process = helpers.begin(*LINE, long, f"run.dir={run}", "run.max_restarts=3")
    words = {1: "rank 1 on node1", 0: "rank 0 on node0", "scheduler": "MindSpore's scheduler"}
    for attempt, which in enumerate(words):
        helpers.until(
            lambda n=attempt: len([r for r in helpers.records(run) if r["attempt"] == n]) > 15,
            what="training",
        )
        doomed = helpers.processes_of(run)
        began = time.monotonic()
        os.kill(victim_of(run, which), signal.SIGKILL)
        next_one = run / "attempts" / f"{attempt + 1:03d}"
        helpers.until(next_one.exists, 10, f"the next attempt after {which}")
        assert time.monotonic() - began < 5, which
        left = [p for p in doomed if helpers.name_of(p).startswith("rank")]
        assert not left, which
    for one in (reference, process):
        output, _ = one.communicate(timeout=120)
        assert one.returncode == 0, output
    assert not helpers.processes_of(run)
    found = helpers.result(run)
    assert len(found["restarts"]) == len(words)
    for note, word in zip(found["restarts"], words.values(), strict=True):
        assert word in note["why"]
        assert note["resumed_from"] > 0
    assert found["weights_sha256"] == helpers.result(undisturbed)["weights_sha256"]


def test_a_rank_that_drifts_from_the_other_is_named(tmp_path):
    run = tmp_path / "run"
    drifting = "job._target_=tests.engine.mindspore.jobs.Drifting"
    done = helpers.call(*LINE, drifting, f"run.dir={run}", "engine.mode=pynative")
    assert done.returncode == 1, done.stdout + done.stderr
    found = helpers.result(run)
    assert (found["state"], found["culprit"]["rank"]) == ("failed", 1)
    assert "the weights of rank 1 are no longer those of rank 0" in found["culprit"]["cause"]
    assert "between the start of update 2 and the step of update 3" in found["culprit"]["cause"]


def test_one_signal_stops_all_ranks_at_a_boundary(tmp_path):
    run = tmp_path / "run"
    process = helpers.begin(*LINE, f"run.dir={run}")
    helpers.until(lambda: len(helpers.records(run)) > 5, what="training")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 3, output
    assert helpers.result(run)["state"] == "stopped"
    assert not helpers.processes_of(run)
