"""What a rank does for a job whose batch script, or whole nodes, are gone while it survived."""

import json
import signal
import subprocess
import sys
import time

import pytest

from orchestrator.errors import NoWayOn, PeerLost
from orchestrator.lifecycle.signs.node_watch import Seen
from orchestrator.lifecycle.signs.processes import state_of
from orchestrator.lifecycle.signs.script_life import beat
from orchestrator.lifecycle.stopping.departure import await_verdict, leave_without, why_restarted
from orchestrator.lifecycle.stopping.stop_signals import StopFlag
from orchestrator.lifecycle.survival.record import GenerationRecord
from orchestrator.lifecycle.topology import Topology
from orchestrator.rundir.files import read_json, write_json
from orchestrator.rundir.folder import CONFIG_SECTIONS, RunDir
from orchestrator.trainer.attendance import ThoseLeft
from orchestrator.trainer.failure import failure_of
from orchestrator.trainer.slurm_watch import Limits, Lost
from tests.helpers import until

TOPOLOGY = Topology(
    rank=2, size=6, local_rank=0, node_index=1, nodes=3, node="n1", address="127.0.0.1",
    job_id="7", base_attempt=0,
)  # fmt: skip


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "run")
    run.create()
    run.begin_attempt()
    sections = {name: {} for name in CONFIG_SECTIONS}
    run.write_config(json.dumps(sections | {"run": {"survive": True}}))
    return run


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """What SLURM's commands are asked; they say yes to all."""
    told = tmp_path / "told"
    for name in ("scontrol", "scancel"):
        command = tmp_path / name
        command.write_text(f'#!/bin/sh\necho {name} "$@" >>{told}\n')
        command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return lambda: told.read_text().splitlines() if told.exists() else []


class Left:
    def __init__(self, place, nodes_gone):
        self.place, self.nodes_gone = (place, 4), nodes_gone

    def end(self, word): ...


@pytest.mark.parametrize(
    ("place", "gone", "script", "result", "requeue", "does"),
    [
        (0, {0}, "gone", False, True, ["scontrol requeue 7"]),
        (0, {0}, "gone", True, True, ["scancel 7"]),
        (0, {0}, "gone", False, False, ["scancel 7"]),
        (0, {0}, "lives", True, True, []),
        (0, {2}, "gone", True, True, []),  # no node of the script's
        (1, {0}, "gone", True, True, []),  # another does it
    ],
)
def test_the_lowest_rank_ends_or_returns_a_job_whose_batch_script_went_with_its_node(
    run, asked, monkeypatch, place, gone, script, result, requeue, does
):
    if script == "lives":
        monkeypatch.setattr(time, "sleep", lambda _: beat(run, 0))
    if result:
        run.write_own(run.result, {"state": "finished", "updates": 9})
    one = ThoseLeft(run, 0, TOPOLOGY)
    one.begin(Left(place, gone))
    one.stand_in_for_script(timeout_s=0.3, requeue=requeue)
    assert asked() == does
    assert run.departure(0).exists() == ("scontrol requeue 7" in does)


def test_too_few_go_back_to_the_queue_where_whole_nodes_are_gone_and_fail_where_ranks_are(
    run, monkeypatch
):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[4-6]")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert not leave_without(run, 0, NoWayOn("nobody has the part of rank 3", ()))
    assert not run.departure(0).exists()
    few = NoWayOn("1 node is left, fewer than cluster.nodes.min=2", (0, 2))
    assert isinstance(few, PeerLost)
    assert leave_without(run, 0, few)
    assert leave_without(run, 0, NoWayOn("a later word", (0,)))  # by another rank: the first counts
    said = read_json(run.departure(0))["why"]
    assert said == "nodes n4, n6 went away; 1 node is left, fewer than cluster.nodes.min=2"
    run.srun_log(0).write_text("srun: error: Node failure on n4\n")  # which was survived
    GenerationRecord(run.attempt(0)).publish(0, range(3))
    run.begin_attempt()
    assert why_restarted(run, 1) == said


def test_who_lost_a_peer_waits_no_longer_than_until_another_has_said_what_failed(run):
    write_json(run.failure(0, 1), failure_of(1, "n0", ValueError("7")))
    assert not await_verdict(run, 0, StopFlag(), 600, survive=True)


@pytest.mark.parametrize("trains", [True, False])
def test_a_frozen_neighbour_is_no_failure_where_the_others_go_on_without_it(run, trains):
    if trains:
        GenerationRecord(run.attempt(0)).publish(0, range(6))
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        process.send_signal(signal.SIGSTOP)
        until(lambda: state_of(process.pid) == "T", what="its stop")
        Lost(run, 0, 3, "n1", process.pid).end(Limits(4, 300, requeue=True), Seen())
        assert process.wait(10) == -signal.SIGKILL
    assert bool(run.failures(0)) is run.departure(0).exists() is not trains
