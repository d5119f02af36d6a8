"""All ranks of a run evaluate together, through losses and restarts."""

import json
import os
import signal

import pytest

from tests import helpers
from tests.hold import begin_held

pytestmark = pytest.mark.whole_runs

RUN = (
    "job._target_=tests.tiny_job.HeldOut",
    "job.dropout=0.2",
    "accumulation.micro_batch=4",
    "accumulation.global_batch=48",
    "train.updates=6",
    "train.evaluate_every=2",
    "tracker=none",
    "optimizer=sgd",
    "schedule.base_lr=0.05",
)
BITS = (*RUN, "accumulation.reduction=reproducible", "run.max_replacements=0")
FIGURES = ["seen.loss", "seen.error", "unseen.loss", "unseen.error", "parameters"]


def evaluations(run):
    """Return the lines of a run's evaluations, by the number of updates before them."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["update"] + 1: line for line in lines if "evaluation" in line}


def figures(run):
    return {done: line["evaluation"] for done, line in evaluations(run).items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the figures of a run of one rank."""
    run = tmp_path_factory.mktemp("alone") / "run"
    shape = ("cluster.nodes=1", "cluster.ranks_per_node=1")
    helpers.call(*BITS, *shape, f"run.dir={run}", "-q", code=0)
    found = figures(run)
    assert {done: list(values) for done, values in found.items()} == dict.fromkeys(
        (2, 4, 6), FIGURES
    )
    assert helpers.result(run)["metrics"] == found[6]
    return found


def test_figures_have_the_same_bits_on_three_ranks_and_their_collective_is_counted(run, alone):
    shape = ("cluster.nodes=1", "cluster.ranks_per_node=3")
    helpers.call(*BITS, *shape, f"run.dir={run}", "-q", code=0)
    assert figures(run) == alone
    assert {line["collectives"] for line in evaluations(run).values()} == {1}
    assert all(line["bytes_on_wire"] > 0 for line in evaluations(run).values())


@pytest.mark.parametrize("lost", [0, 1])
def test_the_others_evaluate_again_where_a_rank_is_lost_in_an_evaluation(run, alone, lost):
    ranks = range(3)
    process, hold = begin_held(
        run, 4, *BITS, "cluster.nodes=3", "cluster.ranks_per_node=1", ranks=ranks
    )
    assert list(evaluations(run)) == [2], "they are held in the second evaluation"
    assert len(helpers.records(run)) == 4
    os.kill(helpers.rank_pid(run, lost), signal.SIGKILL)
    hold.release()
    said = " ".join(helpers.await_exit(process, 0).split())
    assert figures(run) == alone
    assert helpers.result(run)["survived"][0]["gone"] == [lost]
    assert f"rank {lost} went away in the evaluation after update 4" in said
    assert "2 ranks evaluate again" in said
    assert "0 updates redone" in said


def test_a_run_that_ended_in_an_evaluation_begins_with_it_when_it_is_resumed(run, alone):
    process, hold = begin_held(
        run, 4, *BITS, helpers.SMALL, "run.survive=false", "train.checkpoint_every=1"
    )
    os.kill(helpers.rank_pid(run, 1), signal.SIGKILL)
    hold.release()
    helpers.await_exit(process, 1)
    assert list(evaluations(run)) == [2]
    helpers.verb("resume", run, code=0)
    assert figures(run) == alone


def test_ranks_with_shards_of_a_model_evaluate_equally_often(run, tmp_path):
    more = (*RUN, "train.precision=float64", "job.dropout=0", "train.updates=2")
    shards = ("engine.shard_model=node", "cluster.nodes=2", "cluster.ranks_per_node=2")
    helpers.call(*more, *shards, f"run.dir={run}", "-q", code=0)
    whole = tmp_path / "whole"
    shape = ("cluster.nodes=1", "cluster.ranks_per_node=1")
    helpers.call(*more, *shape, f"run.dir={whole}", "-q", code=0)
    assert figures(run)[2] == pytest.approx(figures(whole)[2], rel=1e-12)
