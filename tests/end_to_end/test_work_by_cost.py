"""Runs whose micro-steps are formed by lengths and dealt by measured speeds."""

import os
import signal

from orchestrator.rundir.files import read_json, write_json
from tests.helpers import await_exit, call, rank_pid, records, result, verb
from tests.hold import begin_held

SIZED = "job._target_=tests.tiny_job.Sized"
BY_COST = (
    "accumulation.micro_tokens=40", "accumulation.balance=measured", "accumulation.global_batch=48",
    "job.dropout=0.2", "tracker=none", "train.evaluate_every=0", "run.survive=false",
    "cluster.nodes=1",
)  # fmt: skip
REPRODUCIBLE = "accumulation.reduction=reproducible"


def test_killed_and_resumed_on_other_ranks_the_bits_are_those_of_any_ranks(tmp_path):
    words = (SIZED, *BY_COST, REPRODUCIBLE, "accumulation.batch_schedule=[[6,70]]")
    killed, digests = tmp_path / "killed", set()
    process, hold = begin_held(
        killed, 5, *words, "cluster.ranks_per_node=2", "train.updates=12",
        "train.checkpoint_every=2", "run.max_restarts=1",
    )  # fmt: skip
    os.kill(rank_pid(killed, 1), signal.SIGKILL)
    hold.release()
    await_exit(process, 0)
    for count in (1, 3):
        run = tmp_path / f"{count}"
        ranks = f"cluster.ranks_per_node={count}"
        call(*words, ranks, "train.updates=12", f"run.dir={run}", code=0)
    resumed = tmp_path / "resumed"
    call(*words, "cluster.ranks_per_node=2", "train.updates=3", f"run.dir={resumed}", code=0)
    verb("resume", resumed, "train.updates=12", "cluster.ranks_per_node=3", code=0)
    for run in (killed, tmp_path / "1", tmp_path / "3", resumed):
        digests.add(result(run)["weights_sha256"])
    assert len(digests) == 1


def test_a_rank_that_is_slow_computes_fewer_samples_and_is_named(tmp_path):
    run = tmp_path / "run"
    words = (SIZED, *BY_COST, "cluster.ranks_per_node=2", "train.updates=40", f"run.dir={run}")
    done = call(*words, "job.slow_rank=1", code=0)
    speeds = [record["speeds"] for record in records(run) if "speeds" in record]
    assert speeds
    assert speeds[-1][1] < 0.8 < speeds[-1][0]
    assert "rank 1: it works at 0." in done.stdout


def test_held_out_data_are_dealt_by_their_lengths_and_have_the_same_figures(tmp_path):
    words = (
        "job._target_=tests.tiny_job.SizedHeldOut", *BY_COST, REPRODUCIBLE, "train.updates=2",
        "train.evaluate_every=1",
    )  # fmt: skip
    figures = []
    for count in (1, 3):
        run = tmp_path / f"{count}"
        call(*words, f"cluster.ranks_per_node={count}", f"run.dir={run}", code=0)
        figures.append(result(run)["metrics"])
    assert figures[0] == figures[1]
    assert list(figures[0]) == ["loss", "error"]


def test_other_lengths_than_before_are_refused_at_a_resume(tmp_path):
    run = tmp_path / "run"
    ranks = "cluster.ranks_per_node=1"
    call(SIZED, *BY_COST, ranks, "train.updates=2", f"run.dir={run}", code=0)
    plan = read_json(run / "plan.json")
    write_json(run / "plan.json", plan | {"lengths_digest": "another"})
    done = verb("resume", run, "train.updates=4")
    assert done.returncode != 0
    assert "the samples have other lengths than so far" in done.stdout + done.stderr


def test_without_lengths_the_job_is_told_how_to_give_them(tmp_path):
    words = ("job._target_=tests.tiny_job.Tiny", *BY_COST, "cluster.ranks_per_node=1")
    done = call(*words, f"run.dir={tmp_path / 'run'}")
    assert done.returncode != 0
    assert "define lengths() in Tiny" in done.stderr + done.stdout
