"""Killed ranks get a new process, which joins at a boundary and changes no result."""

import contextlib
import json
import os
import resource
import signal
import time
from functools import partial

import pytest

from orchestrator.rundir.metrics import read_metrics
from tests import helpers
from tests.helpers import TINY
from tests.hold import Hold

pytestmark = [pytest.mark.whole_runs, pytest.mark.long]

RUN = (
    TINY,
    "job.dropout=0.2",
    "job.pause_s=0.1",
    "accumulation.reduction=reproducible",
    "accumulation.micro_batch=4",
    "accumulation.global_batch=48",
    "train.evaluate_every=25",
    "tracker=none",
    "run.survive=true",
)
UPDATES = 100
SHAPE = ("cluster.nodes=2", f"train.updates={UPDATES}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    one = ("cluster.nodes=1", "cluster.ranks_per_node=1", "run.survive=false", "job.pause_s=0")
    helpers.call(*RUN, SHAPE[1], *one, f"run.dir={run}", "-q", code=0)
    return helpers.result(run)


def notes(run, key):
    changes = read_metrics(run / "metrics.jsonl").changes
    return [line[key] for line in changes if key in line]


def came(run):
    return [rank for note in notes(run, "joined") for rank in note["came"]]


@contextlib.contextmanager
def full_disk(pid):
    """Let this process write to no file meanwhile, as where a disk is full."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
    yield
    resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def kill_one_after_another(run, victims, *more, ranks_per_node=2, kill_newcomer=False, full=None):
    """Kill each victim, a rank or a whole node, once the one before it is back. The last update is
    held until all are back; then wait for the end.

    Args:
        kill_newcomer: kill the first victim's first new process before it joins.
        full: a rank that cannot write while the first victim's new process asks to join.
    """
    hold = Hold(run.with_name("hold")).hold_before(UPDATES - 1)
    shape = (*SHAPE, f"cluster.ranks_per_node={ranks_per_node}")
    process = helpers.begin(*RUN, *shape, hold.override, f"run.dir={run}", *more)
    helpers.until(lambda: len(helpers.records(run)) >= 3, what="training")
    back = 0
    for number, victim in enumerate(victims):
        node = victim if isinstance(victim, str) else None
        first = helpers.node_process(run, node).pid if node else helpers.rank_pid(run, victim)
        if not number:
            hold.hold_newcomers()
        os.kill(first, signal.SIGKILL)
        if not number:
            newcomer = helpers.until(partial(other_process, run, victim, first), what="a newcomer")
            if kill_newcomer:
                os.kill(newcomer, signal.SIGKILL)
            if full is None:
                hold.release_newcomers()
            else:
                let_in_with_a_full_disk(run, victim, full, hold)
        back += ranks_per_node if node else 1
        helpers.until(lambda all_=back: len(came(run)) == all_, what="coming back")
        # A loss while the new group forms may cost another rank, too; that is not the subject here.
        seen = len(helpers.records(run))
        helpers.until(partial(trains_or_is_held, run, seen), what="training on")
    hold.release()
    return helpers.await_exit(process, 0)


def let_in_with_a_full_disk(run, newcomer, full, hold):
    """Let a held newcomer ask to join while neither rank `full` nor the coordinator can write."""
    helpers.until(lambda: notes(run, "survived"), what="going on")
    coordinator = helpers.node_process(run, "node0").pid
    with full_disk(helpers.rank_pid(run, full)), full_disk(coordinator):
        hold.release_newcomers()
        log = run / "logs" / f"rank-{newcomer:05d}.log"
        helpers.until(lambda: "asks to join" in log.read_text(), what="a newcomer that asks")
        time.sleep(1.0)  # some boundaries, at each of which it could come in


def trains_or_is_held(run, seen):
    """Return whether more than `seen` updates are recorded, or all before the held one."""
    found = helpers.records(run)
    return len(found) > seen or found[-1]["update"] >= UPDATES - 2


def other_process(run, rank, first):
    """Return the pid of a process of this rank that is not its first one, or None."""
    alive = (p.pid for p in helpers.processes_of(run) if helpers.name_of(p) == f"rank {rank}")
    return next((pid for pid in alive if pid != first), None)


def check_whole(run, undisturbed, *, same_bits):
    found = helpers.result(run)
    for key in ("state", "updates", "samples", "restarts"):
        assert found[key] == undisturbed[key], key
    if same_bits:
        assert found["weights_sha256"] == undisturbed["weights_sha256"]
        assert found["metrics"] == undisturbed["metrics"]
    assert abs(found["loss"] / undisturbed["loss"] - 1) < (1e-12 if same_bits else 1e-5)
    records = read_metrics(run / "metrics.jsonl").updates  # those after a checkpoint were redone
    assert [record["update"] for record in records] == list(range(UPDATES))
    assert {record["attempt"] for record in records} == {0}
    assert not helpers.processes_of(run)


def test_every_killed_rank_comes_back_rank_0_too_and_the_bits_are_the_same(run, undisturbed):
    """Rank 0 comes back to a rank that has come back itself. A full disk only delays it."""
    output = kill_one_after_another(run, [1, 0], ranks_per_node=1, full=0)
    check_whole(run, undisturbed, same_bits=True)
    changes = [
        (key, line[key]["ranks"])
        for line in read_metrics(run / "metrics.jsonl").changes
        for key in ("survived", "joined")
        if key in line
    ]
    assert changes == [("survived", 1), ("joined", 2)] * 2
    assert [note["came"] for note in notes(run, "joined")] == [[1], [0]]
    message = "ranks 1, 0 lost; 2 updates redone; ranks 1, 0 rejoined; 2 ranks went on"
    for said in (message, "metrics.jsonl could not be written: File too large", "room again"):
        assert said in " ".join(output.split())
    status = json.loads(helpers.verb("status", run, "--json").stdout)[0]
    assert (status["survived"], status["rejoined"]) == (2, 2)


def test_sharded_ranks_and_a_node_come_back_though_one_newcomer_dies_on_its_way(run, undisturbed):
    # A lost shard comes from the newest checkpoint.
    shards = ("accumulation.reduction=fast", "engine.shard_optimizer=true")
    more = (*shards, "train.checkpoint_every=2")
    output = kill_one_after_another(run, [2, "node0", 1], *more, kill_newcomer=True)
    assert "so the run goes back to its newest checkpoint, after update" in " ".join(output.split())
    check_whole(run, undisturbed, same_bits=False)
    assert [note["gone"] for note in notes(run, "survived")] == [[2], [0, 1], [1]]
    assert [came(run)[0], sorted(came(run)[1:3]), came(run)[3]] == [2, [0, 1], 1]
    assert notes(run, "joined")[-1]["ranks"] == 4
    assert all("lost_updates" in note for note in notes(run, "survived"))
