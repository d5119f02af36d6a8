"""Nodes that die, whole or in part, seen by SLURM or not."""

import time

import pytest

from slurm import breaking
from tests.helpers import until
from tests.slurm import runs


def vanished(cluster, run, *more, update):
    """Submit a run and, after `update`, kill all it has on its second node; that node."""
    job = runs.submit(cluster, run, *more)
    runs.wait_for_update(run, update)
    lost = runs.nodes_of(cluster, job)[1]
    breaking.kill_jobs(cluster, lost)
    return lost


@pytest.fixture(scope="module", autouse=True)
def ended(slurm, tmp_path_factory):
    """A run that may not be requeued, and its node that was broken; the others run meanwhile."""
    run = tmp_path_factory.mktemp("ended") / "run"
    lost = vanished(
        slurm, run, "train.updates=9000", "job.pause_s=0.1", "cluster.heartbeat_timeout_s=2",
        "cluster.requeue=false", "cluster.exclusive=true",  # what breaks others spares it
        update=3,
    )  # fmt: skip
    return run, lost


@pytest.mark.parametrize("found_by", ["heartbeats", "registration"])
def test_processes_gone_from_a_node_that_slurm_believes_alive_cost_six_updates_at_most(
    found_by, mended, tmp_path, digest_of_60
):
    """What SLURM sees of it by itself is chance: only when slurmd registers, every few minutes,
    is the step missed, and then srun ends it; the job is not requeued.
    """
    run = tmp_path / "run"
    lost = vanished(
        mended, run, "train.updates=60", "job.pause_s=0.05", "train.checkpoint_every=5",
        "cluster.heartbeat_timeout_s=5", update=10,
    )  # fmt: skip
    if found_by == "registration":
        mended.command("scontrol", "reconfigure")
    broken = time.monotonic()
    runs.wait_for_update(run, 10, attempt=1)
    assert time.monotonic() - broken < 60, "13 s if nothing else computes; SLURM takes minutes"
    ended = runs.wait_over(mended, run)
    assert ended["weights_sha256"] == digest_of_60
    note = runs.first_records(run)[1]["restart"]
    assert note["why"] == f"node {lost} stopped answering"
    assert note["lost_updates"] <= 6
    assert runs.status(run)["lost_updates"] == note["lost_updates"]


def test_a_run_that_may_not_be_requeued_ends_with_the_silent_nodes_name(slurm, ended):
    run, lost = ended
    result = runs.wait_over(slurm, run)
    assert (result["state"], result["culprit"]["node"]) == ("failed", lost)
    assert result["culprit"]["cause"].startswith("it stopped answering")


@pytest.mark.timeout(300)
def test_lost_nodes_are_replaced_and_forgotten_ranks_are_fenced_off(mended, tmp_path, digest_of_60):
    """Two runs at once: one node loses power; of another only slurmd dies, and its ranks live on,
    rank 0 among them.
    """
    crashed, orphaned = tmp_path / "crashed", tmp_path / "orphaned"
    options = ("train.updates=60", "train.checkpoint_every=5")
    alone = ("cluster.nodes=1", "cluster.ranks_per_node=2", "cluster.heartbeat_timeout_s=5")
    other = runs.submit(mended, orphaned, *options, *alone, "job.pause_s=0.4")
    job = runs.submit(
        mended, crashed, *options, "job.pause_s=0.1", "cluster.exclusive=true",
        "cluster.heartbeat_timeout_s=60",  # so that it is SLURM who notices
    )  # fmt: skip
    runs.wait_for_update(crashed, 6)
    dead = runs.nodes_of(mended, job)[1]
    forgotten = runs.nodes_of(mended, other)[0]
    assert forgotten not in runs.nodes_of(mended, job)
    breaking.crash_node(mended, dead)
    runs.wait_for_update(orphaned, 6)
    breaking.kill_slurmd(mended, forgotten)
    ranks = [task.pid for task in mended.node_pids(forgotten).tasks]
    assert ranks

    runs.wait_for_update(orphaned, 6, attempt=1, timeout_s=120)
    assert forgotten not in runs.nodes_of(mended, other)
    until(lambda: not mended.node_pids(forgotten).tasks, 20, "the end of the forgotten ranks")
    first = next(r for r in runs.records(orphaned) if r["attempt"] == 1)["time"]
    late = [r for r in runs.records(orphaned) if r["attempt"] == 0 and r["time"] > first]
    assert late == []
    ended = runs.wait_over(mended, orphaned)
    assert ended["weights_sha256"] == digest_of_60
    ended = runs.wait_over(mended, crashed)
    assert ended["weights_sha256"] == digest_of_60
    note = runs.first_records(crashed)[1]["restart"]
    assert note["why"] == f"node {dead} failed"
    assert dead not in runs.nodes_of(mended, job)
