"""Ranks and nodes die in mid-window; the others redo the update and end the run with the bits of an
undisturbed one. With more than one node this needs no key.
"""

import functools
import os
import resource
import signal
import time

import pytest

from orchestrator.rundir.metrics import read_metrics
from tests import helpers
from tests.helpers import LIMIT_S, TINY
from tests.hold import begin_held

pytestmark = pytest.mark.whole_runs

RUN = (
    TINY,
    "job.dropout=0.2",
    "accumulation.reduction=reproducible",
    "accumulation.micro_batch=4",
    "accumulation.global_batch=48",
    "train.updates=12",
    "train.evaluate_every=2",
    "tracker=none",
    "run.max_replacements=0",
)
SHAPE = ("cluster.nodes=3", "cluster.ranks_per_node=2")
EVERY_RANK = range(6)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    helpers.call(*RUN, "cluster.nodes=1", f"run.dir={run}", "-q", code=0)
    return helpers.result(run)


def test_a_run_survives_the_loss_of_rank_0s_node_then_a_rank_then_a_frozen_rank(run, undisturbed):
    process, hold = begin_held(
        run, 3, *RUN, *SHAPE, "cluster.heartbeat_timeout_s=4", ranks=EVERY_RANK
    )
    node, rank_2 = helpers.node_process(run, "node0"), helpers.rank_pid(run, 2)
    # The disk of the rank that writes the metrics is full: updates 3 and 4 are lost with it.
    no_file = (0, resource.RLIM_INFINITY)
    resource.prlimit(helpers.rank_pid(run, 0), resource.RLIMIT_FSIZE, no_file)
    hold.hold_before(5)
    hold.wait_until_held(5, EVERY_RANK)
    hold.hold_before(8)
    (run / "checkpoints" / ".partial-000000005-1").mkdir()  # rank 0 is killed while it saves
    node.kill()
    time.sleep(0.05)  # the others agree on the members or form their group; any moment is right
    os.kill(rank_2, signal.SIGKILL)
    # Ranks 3, 4 and 5; fewer if gloo has lost a send, which ends a rank (trainer/survival.py).
    held = functools.partial(hold.held_members, run, 8, lost=(0, 1, 2))
    members = helpers.until(held, what="holding all members")
    frozen = members[-1]
    os.kill(helpers.rank_pid(run, frozen), signal.SIGSTOP)
    hold.release()
    output = helpers.await_exit(process, 0, timeout=LIMIT_S)
    said = " ".join(output.split())
    assert "a lost rank or node does not end the run (run.survive)" in said
    assert not [*(run / "checkpoints").glob(".partial-*")]
    found, records = helpers.result(run), helpers.records(run)
    for key in ("state", "updates", "samples", "weights_sha256", "loss", "metrics", "restarts"):
        assert found[key] == undisturbed[key], key
    assert [record["update"] for record in records] == list(range(12))
    assert {record["attempt"] for record in records} == {0}
    assert not helpers.processes_of(run)
    notes = [line["survived"] for line in read_metrics(run / "metrics.jsonl").changes]
    left = [rank for rank in members if rank != frozen]
    assert {rank for note in notes for rank in note["gone"]} == {*EVERY_RANK} - {*left}
    assert notes[-1]["ranks"] == len(left)
    why = [reason for note in notes for reason in note["why"]]
    assert any(reason.startswith("on node0: its agent is gone") for reason in why), why
    assert "on node1: killed by signal 9 (SIGKILL)" in why
    assert any("on node2: it was frozen (SIGSTOP) for 4 s" in reason for reason in why), why
    log = (run / "logs" / "rank-00003.log").read_text()
    assert f"rank {frozen} went away in update 9, on node2: it was frozen (SIGSTOP)" in log
    rest = "1 rank redoes it, alone" if len(left) == 1 else f"{len(left)} ranks redo it and go on"
    assert rest in log
    assert found["survived"] == notes  # which the end's table tells


def test_a_checkpoint_follows_the_first_boundary_after_a_loss(run):
    process, hold = begin_held(
        run, 3, *RUN, "cluster.nodes=2", "cluster.ranks_per_node=1", "train.checkpoint_every=100"
    )
    os.kill(helpers.rank_pid(run, 1), signal.SIGKILL)
    hold.hold_before(6)
    hold.wait_until_held(6, (0,))
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["update-000000004"]
    hold.release()
    helpers.await_exit(process, 0)


def test_a_node_that_holds_a_copy_in_shards_is_lost_and_comes_back_as_a_whole(run, tmp_path):
    more = (
        "job.dropout=0",
        "accumulation.reduction=fast",
        "train.precision=float64",
        "run.max_replacements=16",
        "train.checkpoint_every=1",
        "train.checkpoint_in_background=true",
        "engine.shard_model=node",
    )
    process, hold = begin_held(run, 3, *RUN, *SHAPE, *more, ranks=EVERY_RANK)
    hold.hold_before(6)
    hold.wait_until_held(6, EVERY_RANK)
    os.kill(helpers.rank_pid(run, 3), signal.SIGKILL)
    hold.hold_before(8)
    hold.wait_until_held(8, (0, 1, 4, 5))
    for log in (run / "logs" / "rank-00002.log", run / "logs" / "rank-00003.log"):
        helpers.until(lambda log=log: "asks to join" in log.read_text(), what="both asking to join")
    hold.release()
    helpers.await_exit(process, 0, timeout=LIMIT_S)
    changes = read_metrics(run / "metrics.jsonl").changes
    assert [change["survived"]["gone"] for change in changes if "survived" in change] == [[2, 3]]
    assert [change["joined"]["came"] for change in changes if "joined" in change] == [[2, 3]]
    assert [record["update"] for record in helpers.records(run)] == list(range(12))
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == ["update-000000011", "update-000000012"]  # and no .partial-*
    whole = tmp_path / "whole"
    helpers.call(
        *RUN, *more[:-1], "cluster.nodes=1", "cluster.ranks_per_node=1", f"run.dir={whole}", code=0
    )
    assert helpers.compare(run, whole)["max_relative_difference"] <= 1e-12
    assert not helpers.processes_of(run)


def test_below_the_least_number_of_nodes_a_checkpoint_is_written_and_the_run_fails(run):
    process, hold = begin_held(
        run,
        3,
        *RUN,
        "cluster.nodes={min: 2, max: 2}",
        "cluster.ranks_per_node=1",
        "train.checkpoint_every=0",
    )
    os.kill(helpers.rank_pid(run, 1), signal.SIGKILL)
    hold.release()
    output = helpers.await_exit(process, 1)
    assert "fewer than cluster.nodes.min=2" in " ".join(output.split())
    assert helpers.result(run)["culprit"]["rank"] == 1
    assert len(helpers.records(run)) == 3
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["update-000000003"]
