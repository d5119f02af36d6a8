"""Callbacks of job classes: when they are called, what they see, and what their errors do."""

import json
import os
import signal

import pytest

from tests.helpers import await_exit, call, rank_pid, records, result, verb
from tests.hold import begin_held

pytestmark = pytest.mark.whole_runs

JOBS = "job._target_=tests."
COMMON = (
    "cluster.nodes=1",
    "accumulation.global_batch=24",
    "accumulation.micro_batch=4",
    "accumulation.steps=null",
    "train.updates=6",
    "train.evaluate_every=3",
    "run.max_restarts=0",
    "train.checkpoint_every=4",
    "tracker=none",
    "run.survive=false",
)
LIGHT = (*COMMON, f"{JOBS}callback_job.JournaledLight")
HELD_OUT = f"{JOBS}tiny_job.JournaledHeldOut"


def calls(run, rank):
    """Return what a rank's callbacks have written."""
    return [json.loads(line) for line in (run / f"calls-{rank}.jsonl").read_text().splitlines()]


def calls_of(run, rank, method):
    """Return the values of each call of one method."""
    found = [line for line in calls(run, rank) if line[0] == method]
    assert all(line[2] == rank for line in found)
    return [line[4:] for line in found]


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_rank_calls_them_in_order_with_the_recorded_figures(run, tmp_path, ranks):
    shape = (f"cluster.ranks_per_node={ranks}", "accumulation.reduction=reproducible")
    exact = (*COMMON, *shape, "job.dropout=0.2")
    call(*exact, HELD_OUT, f"run.dir={run}", code=0)
    recorded = records(run)
    evaluated = [3, 6]
    for rank in range(ranks):
        lines = calls(run, rank)
        assert {line[3] for line in lines} == {ranks}
        boundaries = calls_of(run, rank, "on_boundary")
        figures = [[line["update"], line["loss"], line["metrics"]] for line in recorded]
        assert boundaries == figures
        # Of update 2 on: its micro-steps, its boundary, its evaluation by all ranks.
        steps = 6 // ranks
        of_update = [line for line in lines if line[1] == 2]
        pieces = [line for line in of_update if line[0] == "on_held_out_piece"]
        assert pieces
        assert [line[0] for line in of_update if line[0] != "on_held_out_piece"] == [
            *["on_micro_step"] * (steps + 1),
            "on_boundary",
            "second",
            "on_evaluation",
        ]
        assert [line[4:] for line in of_update[: steps + 1]] == [
            [2, done, steps] for done in range(steps + 1)
        ]
        evaluations = calls_of(run, rank, "on_evaluation")
        assert [window + 1 for window, _ in evaluations] == evaluated
        assert calls_of(run, rank, "on_checkpoint") == [[4, 96], [6, 144]]
    assert result(run)["metrics"] == calls_of(run, 0, "on_evaluation")[-1][1]

    plain = tmp_path / "plain"
    call(*exact, f"{JOBS}tiny_job.HeldOut", f"run.dir={plain}", code=0)
    assert result(plain)["weights_sha256"] == result(run)["weights_sha256"]
    assert result(plain)["metrics"] == result(run)["metrics"]


def test_a_resumed_run_calls_them_for_its_own_updates(run):
    shape = (*LIGHT, "cluster.ranks_per_node=2")
    call(*shape, "train.updates=2", f"run.dir={run}", code=0)
    verb("resume", run, "train.updates=6", code=0)
    for rank in (0, 1):
        assert [update for update, *_ in calls_of(run, rank, "second")] == list(range(6))
    assert [update for update, _ in calls_of(run, 0, "on_evaluation")] == [1, 2, 5]
    assert calls_of(run, 1, "on_evaluation") == [], "rank 0 evaluates alone"


def test_after_a_loss_the_new_rank_0_misses_no_update(run):
    shape = ("cluster.nodes=3", "cluster.ranks_per_node=1", "run.survive=true")
    words = (*COMMON, HELD_OUT, *shape, "run.max_replacements=0")
    process, hold = begin_held(run, 4, *words, ranks=range(3))
    os.kill(rank_pid(run, 0), signal.SIGKILL)
    hold.release()
    await_exit(process, 0)
    boundaries = [update for update, *_ in calls_of(run, 0, "on_boundary")]
    assert boundaries == [line["update"] for line in records(run)] == list(range(6))
    assert [line[3] for line in calls(run, 0) if line[0] == "on_boundary"] == [3] * 4 + [2] * 2


@pytest.mark.parametrize(
    ("method", "rank", "saved"),
    [("on_boundary", 1, 4), ("on_micro_step", 0, 3), ("on_checkpoint", 1, 4)],
)
def test_an_exception_fails_the_run_with_the_name_of_the_callback(run, method, rank, saved):
    failing = (f"+job.fails_in={method}", f"+job.fails_on={rank}", "train.evaluate_every=0")
    done = call(*COMMON, HELD_OUT, "cluster.ranks_per_node=2", *failing, f"run.dir={run}", code=1)
    said = " ".join(done.stdout.split())
    assert f"rank {rank}" in said
    assert "ZeroDivisionError: the journal is full, at tests/callback_job.py:" in said
    assert f"in the callback Journal.{method}" in said
    log = (run / "logs" / f"rank-{rank:05d}.log").read_text()
    assert f"in the callback Journal.{method}" in log
    assert max(path.name for path in (run / "checkpoints").iterdir()) == f"update-{saved:09d}"
    verb("resume", run, code=0)
    assert result(run)["updates"] == 6


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("nothing", "what Wrong.callbacks() returns must be as in return [Losses()], but is None"),
        ("class", "must be objects, as in return [Losses()], but one is the class Journal"),
        ("function", "must derive from orchestrator.callbacks.Callback, but one is <built-in"),
        ("attribute", "Wrong.callbacks must be a method, as in def callbacks(self): return"),
    ],
)
def test_what_is_no_list_of_callbacks_is_refused(run, what, text):
    job = (f"{JOBS}callback_job.Wrong", f"+job.what={what}")
    done = call(*COMMON, *job, "cluster.ranks_per_node=1", f"run.dir={run}")
    assert done.returncode == 2
    assert text in " ".join((done.stdout + done.stderr).split())
