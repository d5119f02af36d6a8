"""Ranks and nodes die in mid-window; the others end the run, with an undisturbed one's bits. Where
more than one node is planned that needs no key.
"""

import json
import os
import resource
import signal
import time

import pytest

from tests import helpers
from tests.helpers import TINY

RUN = (
    TINY, "job.dropout=0.2", "job.pause_s=0.02", "accumulation.reduction=reproducible",
    "accumulation.micro_batch=4", "accumulation.global_batch=48", "train.updates=12",
    "train.evaluate_every=2", "tracker=none", "run.max_replacements=0",
)  # fmt: skip
SHAPE = ("cluster.nodes=3", "cluster.ranks_per_node=2")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    done = helpers.call(*RUN, "job.pause_s=0", "cluster.nodes=1", f"run.dir={run}", "-q")
    assert done.returncode == 0, done.stdout + done.stderr
    return helpers.result(run)


def disturbed(run, kill, *more, after=3):
    """Start a run, do `kill()` in the middle of a window, and wait for the end."""
    process = helpers.begin(*RUN, *SHAPE, f"run.dir={run}", *more)
    helpers.until(lambda: len(helpers.records(run)) >= after, what="training")
    kill()
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def went_on(run):
    return any("survived" in record for record in helpers.records(run))


def check_whole(run, undisturbed):
    found = helpers.result(run)
    for key in ("state", "updates", "samples", "weights_sha256", "loss", "metrics", "restarts"):
        assert found[key] == undisturbed[key], key
    updates = [record["update"] for record in helpers.records(run)]
    assert updates == list(range(12))
    assert {record["attempt"] for record in helpers.records(run)} == {0}
    assert not helpers.processes_of(run)


def test_the_node_of_rank_0_dies_and_50_ms_later_a_rank_and_then_one_is_stopped(
    tmp_path, undisturbed
):
    run = tmp_path / "run"

    def kill():
        node, other = helpers.node_process(run, "node0"), helpers.rank_pid(run, 2)
        most = resource.RLIM_INFINITY  # the disk of who writes the lines is full
        resource.prlimit(helpers.rank_pid(run, 0), resource.RLIMIT_FSIZE, (0, most))
        time.sleep(0.15)  # some updates, whose lines go with it
        node.kill()
        time.sleep(0.05)  # the others are about to agree on who is left, or form their group
        os.kill(other, signal.SIGKILL)
        helpers.until(lambda: went_on(run), what="going on")
        os.kill(helpers.rank_pid(run, 5), signal.SIGSTOP)

    code, output = disturbed(run, kill, "cluster.heartbeat_timeout_s=4")
    assert code == 0, output
    assert "the others redo its update and go on (run.survive)" in " ".join(output.split())
    check_whole(run, undisturbed)
    notes = [r["survived"] for r in helpers.records(run) if "survived" in r]
    assert sorted(rank for note in notes for rank in note["gone"]) == [0, 1, 2, 5]
    assert notes[-1]["ranks"] == 2
    assert helpers.result(run)["survived"] == notes
    frozen = "rank 5: it was frozen (SIGSTOP) for 4 s (cluster.heartbeat_timeout_s); it was last"
    assert frozen in " ".join(output.split())
    gone = ", ".join(str(rank) for note in notes for rank in note["gone"])
    assert f"ranks {gone} lost; {len(notes)} updates redone; 2 ranks went on" in output
    assert (
        json.loads(helpers.verb("status", run, "--json").stdout)[0]["survived"]
        == notes[-1]["generation"]
    )


def test_shards_kept_twice_outlive_a_node_and_come_from_the_newest_checkpoint_when_more_die(
    tmp_path, undisturbed
):
    run = tmp_path / "run"

    def kill():
        node = next(p for p in helpers.processes_of(run) if helpers.name_of(p) == "node0")
        node.kill()
        helpers.until(lambda: went_on(run) and len(helpers.records(run)) >= 7, what="going on")
        for rank in (2, 3, 4):
            os.kill(helpers.rank_pid(run, rank), signal.SIGKILL)

    code, output = disturbed(
        run, kill, "accumulation.reduction=fast", "engine.shard_optimizer=true",
        "run.memory_checkpoint=true", "train.checkpoint_every=5",
    )  # fmt: skip
    assert code == 0, output
    said = " ".join(output.split())
    assert "so the run goes back to its newest checkpoint, after update 5; 1 rank redoes" in said
    found, records = helpers.result(run), helpers.records(run)
    assert found["samples"] == undisturbed["samples"]
    assert abs(found["loss"] / undisturbed["loss"] - 1) < 1e-5
    one, other = [record for record in records if "survived" in record]
    assert [one["survived"]["gone"], other["survived"]["gone"]] == [[0, 1], [2, 3, 4]]
    assert "lost_updates" not in one["survived"]
    assert other["update"] == 5
    before = records[: records.index(other)]
    assert other["survived"]["lost_updates"] == before[-1]["update"] - 4
    assert [r["update"] for r in before] == list(range(len(before)))
    assert [r["update"] for r in records[len(before) :]] == list(range(5, 12))
    assert {record["attempt"] for record in records} == {0}
    assert not helpers.processes_of(run)


def test_an_exception_in_the_job_is_not_survived(tmp_path):
    run = tmp_path / "run"
    done = helpers.call(*RUN, "cluster.nodes=2", "job.fault=raise", f"run.dir={run}", "-q")
    assert done.returncode == 1
    culprit = helpers.result(run)["culprit"]
    assert culprit["rank"] == 1
    assert "told to fail" in culprit["cause"]
    assert not any("survived" in record for record in helpers.records(run))


def test_below_the_least_number_of_nodes_a_checkpoint_is_written_and_the_run_fails(tmp_path):
    run = tmp_path / "run"
    code, output = disturbed(
        run, lambda: os.kill(helpers.rank_pid(run, 1), signal.SIGKILL),
        "cluster.nodes={min: 2, max: 2}", "cluster.ranks_per_node=1", "train.checkpoint_every=0",
    )  # fmt: skip
    assert code == 1
    assert "fewer than cluster.nodes.min=2" in " ".join(output.split())
    assert helpers.result(run)["culprit"]["rank"] == 1
    done = len(helpers.records(run))
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"update-{done:09d}"]
