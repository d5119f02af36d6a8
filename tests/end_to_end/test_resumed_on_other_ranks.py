"""A run goes on with other settings, to the bits that it would have had; a new one starts warm."""

import json
import os
import shutil
import signal

import numpy as np
import pytest
from safetensors.numpy import save_file

from orchestrator.rundir.files import read_json, write_json
from tests.helpers import SMALL, TINY, await_exit, call, rank_pid, records, result, verb
from tests.hold import begin_held

pytestmark = pytest.mark.whole_runs

LEAVES = (
    "accumulation.reduction=reproducible",
    "accumulation.micro_batch=8",
    "accumulation.global_batch=48",
    "job.dropout=0.2",
    "tracker=none",
    "train.evaluate_every=0",
)


def started(run, *more):
    call(TINY, *LEAVES, f"run.dir={run}", *more, code=0)


def test_more_updates_on_other_ranks_end_with_the_bits_of_a_run_that_was_never_stopped(tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    started(whole, "train.updates=12", "cluster.nodes=1", "cluster.ranks_per_node=2")
    three = ("cluster.nodes=1", "cluster.ranks_per_node=3")
    started(run, "train.updates=4", *three, "run.survive=false")
    assert "finished already" in verb("resume", run).stdout
    done = verb("resume", run, "train.seed=3")
    assert (done.returncode, result(run)["updates"]) == (2, 4)
    assert "train.initial_weights=" in done.stderr

    for other in (whole, run):
        environment = read_json(other / "environment.json")
        environment["framework"]["threads"] = "99"
        write_json(other / "environment.json", environment)
    done = verb(
        "resume", run, "train.updates=12", "cluster.nodes=2", "cluster.ranks_per_node=1", code=0
    )
    assert "threads 1 against 99" in " ".join(done.stdout.split()), "what changed is said"
    assert result(run)["weights_sha256"] == result(whole)["weights_sha256"]
    assert "computed with another threads: 99 against 1" in verb("compare", whole, run).stdout
    assert result(run)["updates"] == 12
    assert not list(run.glob("attempts/*/generation-*")), "run.survive=false is kept"
    [status] = json.loads(verb("status", run, "--json").stdout)
    assert (status["attempts"], status["restarts"]) == (2, 0)


GROWING = ("accumulation.batch_schedule=[[3,80],[7,120]]", "schedule.scaling=sqrt")


def test_killed_while_its_batch_grows_it_ends_with_the_same_bits_on_1_2_and_3_ranks(tmp_path):
    growing, digests = (*GROWING, "train.samples=900", "run.survive=false"), set()
    ranks = ("cluster.nodes=1", "cluster.ranks_per_node=2")
    killed = tmp_path / "killed"
    process, hold = begin_held(
        killed, 5, TINY, *LEAVES, *growing, *ranks, "run.max_restarts=1", "train.checkpoint_every=2"
    )
    hold.wait_until_held(5, (0, 1))
    os.kill(rank_pid(killed, 1), signal.SIGKILL)
    hold.release()
    await_exit(process, 0)
    for count in (1, 3):
        place = ("cluster.nodes=1", f"cluster.ranks_per_node={count}")
        started(tmp_path / f"{count}", *growing, *place)
    # The stage of 120 begins in the resumed part, on other ranks.
    started(tmp_path / "resumed", *growing[:2], "train.samples=400", *ranks, "run.survive=false")
    verb("resume", tmp_path / "resumed", "train.samples=900", "cluster.ranks_per_node=3", code=0)
    for name in ("killed", "1", "3", "resumed"):
        folder = tmp_path / name
        digests.add(result(folder)["weights_sha256"])
        lines = {record["update"]: record for record in records(folder)}
        # Epochs of 240 samples: an update ends with them.
        sizes = [48, 48, 48, 80, 16, 80, 80, 80, 120, 120, 120, 120]
        assert [line["samples"] for line in lines.values()] == sizes
        grown = lines[3]["learning_rate"] / lines[2]["learning_rate"]
        assert grown == pytest.approx((80 / 48) ** 0.5)
    assert len(digests) == 1


def test_a_schedule_can_only_change_beyond_the_updates_that_were_planned(tmp_path):
    run = tmp_path / "run"
    started(run, *GROWING, "train.updates=5", SMALL)
    done = verb("resume", run, "accumulation.batch_schedule=[[4,80]]", "train.updates=6", code=2)
    said = " ".join(done.stderr.split())
    assert "after update 3 an update would be of 48 samples, but was to be of 80" in said
    assert "accumulation.batch_schedule can change after update 5 only" in said
    further = "accumulation.batch_schedule=[[3,80],[6,100]]"
    verb("resume", run, further, "train.updates=8", code=0)
    assert [record["samples"] for record in records(run)][-4:] == [16, 80, 100, 60]


def test_a_run_starts_from_anothers_weights_goes_on_without_it_and_refuses_another_models(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    started(first, "train.updates=3", "cluster.nodes=1", "cluster.ranks_per_node=1")
    warm = (f"train.initial_weights={first}",)
    started(second, "train.updates=1", "schedule.base_lr=1e-30", *warm, "cluster.ranks_per_node=1")
    assert result(second)["weights_sha256"] == result(first)["weights_sha256"]
    verb("resume", first, "train.updates=4", code=0)
    verb("resume", second, "train.updates=2", code=0)

    other = call(TINY, "job.width=3", "train.updates=1", f"run.dir={tmp_path / 'o'}", *warm, code=2)
    assert " ".join(other.stderr.split()).startswith(
        f"error: train.initial_weights={first}: the weights do not fit this model: 0.bias is "
        "float32[16], but must be float32[3]; 0.weight is float32[16, 8], but must be float32[3, 8]"
    )
    assert not (tmp_path / "o").exists()
    shutil.rmtree(first)
    verb("resume", second, "train.updates=3", code=0)


def test_weights_that_are_none_are_refused_before_anything_starts(tmp_path):
    save_file({"x": np.ones(3)}, tmp_path / "one.safetensors")
    (tmp_path / "text").write_text("no weights")
    for name, said in (
        ("gone", "there is no weights file"),
        ("text", "is damaged"),
        (".", "is not a run folder"),
    ):
        done = verb("plan", TINY, f"train.initial_weights={tmp_path / name}", code=2)
        assert said in " ".join(done.stderr.split())
        assert "train.initial_weights=" in done.stderr
    verb("plan", TINY, f"train.initial_weights={tmp_path}/one.safetensors", code=0)
