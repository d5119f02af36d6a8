"""Runs whose micro-steps are formed by lengths and dealt by measured speeds."""

import os
import signal

import pytest

from orchestrator.rundir.files import read_json, write_json
from tests.helpers import await_exit, call, compare, rank_pid, records, result, verb
from tests.hold import begin_held

pytestmark = pytest.mark.whole_runs

SIZED = "job._target_=tests.tiny_job.Sized"
BY_COST = (
    "accumulation.micro_tokens=40",
    "accumulation.balance=measured",
    "accumulation.global_batch=48",
    "job.dropout=0.2",
    "tracker=none",
    "train.evaluate_every=0",
    "run.survive=false",
    "cluster.nodes=1",
)
REPRODUCIBLE = "accumulation.reduction=reproducible"


def test_killed_and_resumed_on_other_ranks_the_bits_are_those_of_any_ranks(tmp_path):
    words = (SIZED, *BY_COST, REPRODUCIBLE, "accumulation.batch_schedule=[[6,70]]")
    killed, digests = tmp_path / "killed", set()
    process, hold = begin_held(
        killed,
        5,
        *words,
        "cluster.ranks_per_node=2",
        "train.updates=12",
        "train.checkpoint_every=2",
        "run.max_restarts=1",
    )
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


def test_slow_rank_computes_fewer_samples(tmp_path):
    run = tmp_path / "run"
    words = (SIZED, *BY_COST, "cluster.ranks_per_node=2", "train.updates=40", f"run.dir={run}")
    done = call(*words, "job.slow_rank=1", code=0)
    speeds = [record["speeds"] for record in records(run) if "speeds" in record]
    assert speeds
    assert speeds[-1][1] < speeds[-1][0]
    assert "rank 1: it works at 0." in done.stdout
    assert [len(column) for column in result(run)["seconds_of_ranks"].values()] == [2, 2]


def test_held_out_data_are_dealt_by_their_lengths_and_have_the_same_figures(tmp_path):
    words = (
        "job._target_=tests.tiny_job.SizedHeldOut",
        *BY_COST,
        REPRODUCIBLE,
        "train.updates=2",
        "train.evaluate_every=1",
    )
    figures = []
    for count in (1, 3):
        run = tmp_path / f"{count}"
        call(*words, f"cluster.ranks_per_node={count}", f"run.dir={run}", code=0)
        figures.append(result(run)["metrics"])
    assert figures[0] == figures[1]
    assert list(figures[0]) == ["loss", "error"]


def test_ranks_with_shards_of_a_model_evaluate_rounds_of_alike_lengths(tmp_path):
    words = (
        "job._target_=tests.tiny_job.SizedHeldOut",
        *BY_COST,
        "accumulation.balance=even",
        "job.dropout=0",
        "train.precision=float64",
        "train.updates=2",
        "train.evaluate_every=1",
    )
    figures = []
    for shape in ((1, 1, "none"), (1, 3, "node")):
        run = tmp_path / f"{shape[1]}"
        nodes, ranks, shards = shape
        layout = (f"cluster.nodes={nodes}", f"cluster.ranks_per_node={ranks}")
        call(*words, *layout, f"engine.shard_model={shards}", f"run.dir={run}", code=0)
        figures.append(result(run)["metrics"])
    assert figures[1] == pytest.approx(figures[0], rel=1e-12)


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


def speeds_by_update(run):
    """Return the speeds that were recorded, by the update that they apply from."""
    return {line["update"]: line["speeds"] for line in records(run) if "speeds" in line}


def test_recorded_speeds_repeat_a_run_bit_for_bit_in_fast_mode(tmp_path):
    first, again = tmp_path / "first", tmp_path / "again"
    words = (SIZED, *BY_COST[:1], *BY_COST[2:], "cluster.ranks_per_node=2", "train.updates=24")
    measured = ("accumulation.balance=measured", "job.slow_rank=1")
    call(*words, *measured, f"run.dir={first}", code=0)
    recorded = f"accumulation.balance={first}"
    call(*words, recorded, "train.updates=9", f"run.dir={again}", code=0)
    planned = " ".join(verb("plan", *words, recorded, code=0).stdout.split())
    assert f"work is dealt by the speeds that {first} has recorded" in planned
    first.rename(tmp_path / "elsewhere")  # a run is whole without the other
    verb("resume", again, "train.updates=24", code=0)
    first = tmp_path / "elsewhere"
    assert len(speeds_by_update(first)) > 1
    assert speeds_by_update(again) == speeds_by_update(first)
    assert result(again)["weights_sha256"] == result(first)["weights_sha256"]
    other = verb("resume", again, "train.updates=30", "cluster.ranks_per_node=3", code=2)
    assert "its speeds are of 2 ranks, but this run has 3 ranks; start it on 2" in other.stderr
    even = verb("resume", again, "train.updates=30", "accumulation.balance=even", code=0)
    assert "sums are added in another order" in even.stdout + even.stderr


def test_speeds_that_are_not_recorded_are_refused_before_anything_starts(tmp_path):
    words = (SIZED, *BY_COST[:1], *BY_COST[2:], "cluster.ranks_per_node=2", "train.updates=2")
    typed = call(*words, "accumulation.balance=measurd", f"run.dir={tmp_path / 'a'}", code=2)
    assert "did you mean 'measured'?" in typed.stderr
    even = tmp_path / "even"
    call(*words, f"run.dir={even}", code=0)
    none = verb("plan", *words, f"accumulation.balance={even}", code=2)
    assert "that run has recorded no speeds" in none.stderr


def test_a_restart_begins_with_the_speeds_that_were_measured_before(tmp_path):
    run = tmp_path / "run"
    words = (SIZED, *BY_COST, "cluster.ranks_per_node=2", "train.updates=20", "job.slow_rank=1")
    fault = ("job.fault=kill", "job.fault_rank=0", "job.fault_after=150")
    every = ("train.checkpoint_every=3", "run.max_restarts=1")
    call(*words, *fault, *every, f"run.dir={run}", code=0)
    assert result(run)["restarts"]
    first = next(line for line in records(run) if line["attempt"] == 1)
    assert first["update"] > 8
    assert first["speeds"][1] < first["speeds"][0], "without them it begins with equal ones"


def test_survivors_keep_their_speeds(tmp_path):
    run = tmp_path / "run"
    words = (
        SIZED,
        *BY_COST,
        "cluster.ranks_per_node=3",
        "train.updates=24",
        "job.slow_rank=2",
        "run.survive=true",
        "run.max_replacements=0",
    )
    call(
        *words, "job.fault=kill", "job.fault_rank=0", "job.fault_after=80", f"run.dir={run}", code=0
    )
    before, after = [], None
    for line in records(run):
        if after is None and len(line.get("speeds", before)) == 2:
            after = line["speeds"]
        before = line.get("speeds", before)
    assert after[1] < after[0], "without them they begin with equal ones"


def test_ranks_of_a_model_in_shards_have_as_many_micro_steps_and_the_same_update(tmp_path):
    words = (
        SIZED,
        *BY_COST[:1],
        *BY_COST[2:],
        "job.dropout=0",
        "train.precision=float64",
        "train.updates=4",
    )
    alone, shards = tmp_path / "alone", tmp_path / "shards"
    call(*words, "cluster.ranks_per_node=1", f"run.dir={alone}", code=0)
    in_shards = ("cluster.ranks_per_node=2", "engine.shard_model=all")
    call(*words, *in_shards, f"run.dir={shards}", code=0)
    plan = read_json(shards / "plan.json")
    first, second = map(len, plan["micro_batches"])
    assert first - second in (0, 1)
    assert plan["busiest_to_mean"] < 1.05
    assert compare(shards, alone)["max_relative_difference"] <= 1e-12
