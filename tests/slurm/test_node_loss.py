"""Ranks and nodes that die, as a whole or in part, whether SLURM notices or not."""

import pytest

from orchestrator.rundir.metrics import read_metrics
from slurm import breaking
from tests.helpers import TINY, node_process, records, until
from tests.hold import Hold
from tests.refusals import mentions
from tests.slurm import runs

pytestmark = [pytest.mark.slurm, pytest.mark.long]


def test_a_node_without_processes_is_noticed_though_slurm_calls_it_alive(mended, tmp_path, digest):
    run = tmp_path / "run"
    hold = runs.submit_long(mended, run, "cluster.heartbeat_timeout_s=5", "run.survive=false")
    runs.wait_for_update(run, 10)
    lost = runs.nodes_of(mended, runs.job_of(run))[1]
    breaking.kill_jobs(mended, lost)
    runs.wait_for_update(run, 10, attempt=1, timeout_s=90)  # SLURM itself takes minutes
    hold.release()
    ended = runs.wait_over(mended, run)
    assert ended["weights_sha256"] == digest
    note = runs.first_records(run)[1]["restart"]
    # Of a killed step, srun may notice as well, and on a slow machine before our agents do.
    assert note["why"] in (f"node {lost} stopped answering", f"node {lost} failed")
    assert note["lost_updates"] <= 6
    assert runs.status(run)["lost_updates"] == note["lost_updates"]


def test_lost_nodes_are_replaced_and_ranks_that_live_on_are_fenced_off(mended, tmp_path, digest):
    """Two runs at once: one node loses power; of another only slurmd dies and its ranks live on."""
    crashed, orphaned = tmp_path / "crashed", tmp_path / "orphaned"
    alone = ("cluster.nodes=1", "cluster.ranks_per_node=2", "cluster.heartbeat_timeout_s=5")
    holds = [runs.submit_long(mended, orphaned, *alone)]
    other = runs.job_of(orphaned)
    [forgotten] = until(lambda: runs.nodes_of(mended, other), what="the orphaned run's node")
    # Of four nodes two are lost; both runs fit on the others, whichever SLURM restarts first.
    apart = (f"cluster.exclude={forgotten}", "run.survive=false")
    late = "cluster.heartbeat_timeout_s=60"  # so SLURM notices first
    holds.append(runs.submit_long(mended, crashed, *apart, late))
    job = runs.job_of(crashed)
    runs.wait_for_update(crashed, 6)
    dead = runs.nodes_of(mended, job)[1]
    breaking.crash_node(mended, dead)
    runs.wait_for_update(orphaned, 6)
    breaking.kill_slurmd(mended, forgotten)
    assert mended.node_pids(forgotten).tasks, "the ranks live on"

    runs.wait_for_update(orphaned, 6, attempt=1, timeout_s=120)
    assert forgotten not in runs.nodes_of(mended, other)
    until(lambda: not mended.node_pids(forgotten).tasks, what="the end of the forgotten ranks")
    first = next(r for r in records(orphaned) if r["attempt"] == 1)["time"]
    assert [r for r in records(orphaned) if r["attempt"] == 0 and r["time"] > first] == []
    holds[0].release()
    assert runs.wait_over(mended, orphaned)["weights_sha256"] == digest
    runs.wait_for_update(crashed, 6, attempt=1)
    holds[1].release()
    assert runs.wait_over(mended, crashed)["weights_sha256"] == digest
    why = runs.first_records(crashed)[1]["restart"]["why"]  # by the first that notices
    assert mentions(why, f"node {dead}"), why
    assert dead not in runs.nodes_of(mended, job)


UPDATES = 150
SURVIVES = (
    TINY,
    f"train.updates={UPDATES}",
    "job.dropout=0.2",
    "accumulation.micro_batch=4",
    "accumulation.global_batch=48",
    "accumulation.steps=null",
    "train.evaluate_every=50",
    "accumulation.reduction=reproducible",
)


def ranks_of(run, key, word):
    """Return the ranks that the records name as lost, or as back again."""
    notes = [line[key] for line in read_metrics(run / "metrics.jsonl").changes if key in line]
    return [rank for note in notes for rank in note[word]]


def test_a_worker_an_agent_and_a_node_are_lost_and_the_job_goes_on(mended, tmp_path):
    """As is the default: run.survive is not stated.

    A worker is started again by its agent, an agent by its parent, and that by the batch script.
    """
    run = tmp_path / "run"
    hold = Hold(tmp_path / "hold").hold_before(UPDATES - 1)
    job = runs.submit(
        mended,
        run,
        *SURVIVES,
        hold.override,
        "job.pause_s=0.1",
        "train.checkpoint_every=0",
        "cluster.nodes=3",
        "cluster.ranks_per_node=2",
    )
    one = ("cluster.nodes=1", "cluster.ranks_per_node=2")
    digest = runs.reference(tmp_path / "undisturbed", *SURVIVES, *one)
    runs.wait_for_update(run, 3)
    nodes = runs.nodes_of(mended, job)
    node_process(run, "rank 4").kill()
    until(lambda: ranks_of(run, "joined", "came") == [4], what="rank 4 again")
    node_process(run, nodes[0]).kill()  # the agent that coordinates
    until(lambda: sorted(ranks_of(run, "joined", "came")) == [0, 1, 4], what="the first node again")
    node_process(run, nodes[1]).parent().kill()  # no process of that node's task is left
    until(
        lambda: sorted(ranks_of(run, "joined", "came")) == [0, 1, 2, 3, 4], what="the second node"
    )
    breaking.set_node_down(mended, nodes[2])
    until(lambda: ranks_of(run, "survived", "gone").count(5), what="the loss of the node")
    hold.release()
    found = runs.wait_over(mended, run)
    assert found["weights_sha256"] == digest
    assert runs.accounted(mended, job) == "COMPLETED"
    assert {record["attempt"] for record in records(run)} == {0}
    assert [record["update"] for record in records(run)] == list(range(UPDATES))
    assert sorted(ranks_of(run, "survived", "gone")) == [0, 1, 2, 3, 4, 4, 5]


def test_a_first_node_that_is_set_down_has_another_agent_requeue_the_job(mended, tmp_path):
    """SLURM ends its batch script, and the other ranks after KillWait (3 s here)."""
    run = tmp_path / "run"
    hold = runs.submit_long(mended, run, TINY)
    runs.wait_for_update(run, 3)
    breaking.set_node_down(mended, runs.nodes_of(mended, runs.job_of(run))[0])
    runs.wait_for_update(run, 3, attempt=1)
    hold.release()
    assert runs.wait_over(mended, run)["state"] == "finished"
    assert runs.first_records(run)[1]["restart"]["lost_updates"] == 0


def test_a_run_folder_that_the_nodes_cannot_see_is_named_as_the_cause(slurm, tmp_path):
    run = tmp_path / "run"
    runs.submit(slurm, run, "train.updates=1", "+cluster.slurm_flags.begin=now+3600")
    run.rename(tmp_path / "elsewhere")
    runs.release(slurm, tmp_path / "elsewhere")
    until(lambda: runs.over(slurm, runs.job_of(tmp_path / "elsewhere")), what="the job's end")
    found = runs.status(tmp_path / "elsewhere")
    assert found["state"] == "failed"
    assert mentions(found["reason"], f"folder {tmp_path / 'elsewhere'}"), found["reason"]
