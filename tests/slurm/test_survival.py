"""Ranks and nodes die in mid-window; the others go on, in one job, to an undisturbed run's end."""

import os
import signal

import pytest

from slurm import breaking
from tests.helpers import TINY, records, result, until
from tests.slurm import runs

RUN = (
    TINY, "train.updates=40", "job.dropout=0.2", "job.pause_s=0.1", "accumulation.micro_batch=4",
    "accumulation.global_batch=48", "accumulation.steps=null", "train.evaluate_every=5",
)  # fmt: skip
REPRODUCIBLE = "accumulation.reduction=reproducible"


def kill_first_node(cluster, run):
    """Kill -9 of all ranks that it has on rank 0's node, where the batch script runs."""
    job = runs.job_of(run)
    first = runs.nodes_of(cluster, job)[0]
    for task in cluster.node_pids(first).tasks:
        if (str(task.job), task.rank is None) == (job, False):
            os.kill(task.pid, signal.SIGKILL)


def survived(run):
    return [record["survived"] for record in records(run) if "survived" in record]


@pytest.mark.timeout(240)
def test_rank_0s_node_is_killed_and_another_set_down_and_the_job_ends_as_if_nothing_had_been(
    mended, tmp_path
):
    """Beside it a job with a sharded optimizer, which loses a rank, and then the last of a node: it
    needs both of its nodes, and begins again from its newest checkpoint.
    """
    whole, shards = tmp_path / "whole", tmp_path / "shards"
    more = (*RUN, "run.survive=true", "cluster.ranks_per_node=2")
    runs.submit(mended, whole, *more, REPRODUCIBLE, "train.checkpoint_every=0", "cluster.nodes=3")
    job = runs.submit(
        mended,
        shards,
        *more,
        "engine.shard_optimizer=true",
        "train.checkpoint_every=1",
        "cluster.nodes={min: 2, max: 2}",
    )
    undisturbed = tmp_path / "undisturbed"
    digest = runs.reference(
        undisturbed, *RUN, REPRODUCIBLE, "job.pause_s=0", "cluster.nodes=1",
        "cluster.ranks_per_node=2",
    )  # fmt: skip
    for rank in (1, 0):
        runs.wait_for_update(shards, 3)
        breaking.signal_rank(mended, job, rank, signal.SIGKILL)
        until(lambda: survived(shards), 20, "going on")
    runs.wait_for_update(whole, 3)
    kill_first_node(mended, whole)
    until(lambda: survived(whole), 20, "going on")
    breaking.set_node_down(mended, runs.nodes_of(mended, runs.job_of(whole))[2])

    found = runs.wait_over(mended, whole)
    assert runs.accounted(mended, runs.job_of(whole)) == "COMPLETED"
    assert found["weights_sha256"] == digest
    assert {record["attempt"] for record in records(whole)} == {0}
    assert [record["update"] for record in records(whole)] == list(range(40))
    assert [(note["gone"], note["nodes"]) for note in survived(whole)] == [([0, 1], 2), ([4, 5], 1)]

    found = runs.wait_over(mended, shards)
    assert found["state"] == "finished"
    assert abs(found["loss"] / result(undisturbed)["loss"] - 1) < 1e-5
    assert [note["gone"] for note in survived(shards)] == [[1]]
    note = runs.first_records(shards)[1]["restart"]
    assert "fewer than cluster.nodes.min=2" in note["why"]
    assert note["lost_updates"] <= 1
