"""With `run.survive` srun ends nobody: what the process beside it makes of each rank's end."""

import json
import signal
import subprocess
import sys
import threading

import pytest

from orchestrator.clusters.slurm import losses
from orchestrator.clusters.slurm.losses import GRACE_S, SAID_S, Step, stand_by
from orchestrator.clusters.slurm.root_cause import blame_slurm
from orchestrator.errors import FENCED_RANK
from orchestrator.lifecycle.signs.script_life import is_silent
from orchestrator.lifecycle.stopping.departure import why_restarted
from orchestrator.lifecycle.survival.record import GenerationRecord
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import CONFIG_SECTIONS, RunDir
from orchestrator.trainer.failure import failure_of

KILLED = "srun: error: n0: tasks 0-1: Killed\n"


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "run")
    run.create()
    run.begin_attempt()
    run.write_config(json.dumps({name: {} for name in CONFIG_SECTIONS}))
    return run


def begin(run):
    return GenerationRecord(run.attempt(0)).publish(0, range(6))


def said(run, text, wordless=""):
    run.srun_log(0).write_text(text)
    if wordless:
        run.wordless(0).write_text(wordless)


@pytest.mark.parametrize(
    ("begun", "srun", "wordless", "blamed"),
    [
        (True, KILLED, "0 n0\n1 n0\n", None),
        (True, "srun: error: n1: task 3: Terminated\n", "", None),
        (True, f"srun: error: n1: task 3: Exited with exit code {FENCED_RANK}\n", "", None),
        (True, "srun: error: Node failure on n1\n", "2 n1\n3 n1\n", None),
        (True, f"{KILLED}srun: error: n1: task 3: Segmentation fault (core dumped)\n", "", 3),
        (True, f"{KILLED}srun: error: n2: task 5: Exited with exit code 7\n", "", 5),
        (True, KILLED, "1 n0\n4 n2\n", 4),
        (False, KILLED, "", 0),
        (False, "srun: error: n1: task 3: Exited with exit code 1\n", "", 3),
        (False, "", "", None),
    ],
)
def test_what_was_taken_away_in_training_is_a_loss_and_any_other_end_a_failure_that_names_its_rank(
    run, begun, srun, wordless, blamed
):
    if begun:
        begin(run)
    said(run, srun, wordless)
    step = Step(run, 0)
    for now in (1.0, 2.0 + SAID_S):
        step.note_failures(now)
    assert [failure["rank"] for failure in run.failures(0)] == ([] if blamed is None else [blamed])
    assert step.patience_s() == (None if blamed is None else GRACE_S)
    if blamed is not None:
        culprit = blame_slurm(run, 0, {}, 137)
        assert culprit.rank == blamed
        assert culprit.cause


def test_of_losses_only_those_that_nobody_survived_are_blamed(run):
    record = begin(run) and GenerationRecord(run.attempt(0))
    record.publish(1, (2, 3, 4, 5), gone=[0, 1])
    record.publish(2, (2,), gone=[3, 4, 5])
    lost = {"time": 1.0, "cause": "nobody has the part of rank 3", "usage": False}
    write_json(run.failure(0, 2), {**lost, "rank": 2, "node": "n1", "secondary": True})
    said(run, f"{KILLED}srun: error: n2: tasks 4-5: Killed\nsrun: error: n1: task 3: Killed\n")
    assert blame_slurm(run, 0, {}, 137).rank == 4
    said(run, "srun: error: n1: task 2: Killed\n")
    assert blame_slurm(run, 0, {}, 137).rank == 2


def test_a_node_that_was_survived_is_not_to_blame_for_what_ends_the_attempt_later(run):
    """Its ranks were killed, and said nothing; later a link is cut, and everybody loses a peer."""
    record = begin(run) and GenerationRecord(run.attempt(0))
    record.publish(1, (0, 1, 4, 5), gone=[2, 3])
    failed = "srun: error: n0: task 0: Exited with exit code 1\n"
    killed = "srun: error: n1: tasks 2-3: Killed\nsrun: error: Node failure on n1\n"
    said(run, killed + failed, "2 n1\n3 n1\n")
    for index, node in enumerate(("n0", "n1", "n2")):
        write_json(run.node_ranks(0, index), {"node": node, "ranks": [2 * index, 2 * index + 1]})
    lost = {"time": 1.0, "cause": "rank 0 lost a peer", "usage": False, "secondary": True}
    write_json(run.failure(0, 0), {**lost, "rank": 0, "node": "n0"})
    assert blame_slurm(run, 0, run.nodes_of_ranks(0), 1).rank == 0
    run.begin_attempt()
    assert why_restarted(run, 1) is None
    said(run, killed + failed, "2 n1\n3 n1\n4 n2\n")
    assert blame_slurm(run, 0, run.nodes_of_ranks(0), 1).rank == 4
    said(run, "srun: error: Node failure on n1\nsrun: error: Node failure on n2\n")
    assert why_restarted(run, 1) == "node n2 failed"


@pytest.mark.parametrize("left", ["a failure", "a result"])
def test_srun_is_ended_when_a_rank_has_failed_or_a_lost_node_keeps_it_from_its_end(
    run, left, monkeypatch
):
    """It heeds nothing but SIGKILL, as one that waits for a node that does not answer."""
    quick = [(number, 0.1) for number, _ in losses.WAYS]
    for name, value in (("LOOK_S", 0.02), ("GRACE_S", 0.1), ("END_S", 0.1), ("WAYS", quick)):
        monkeypatch.setattr(losses, name, value)
    monkeypatch.setattr(losses, "die_with", lambda _: None)
    monkeypatch.setattr(losses.signal, "signal", lambda *_: None)
    deaf = "[signal.signal(n, signal.SIG_IGN) for n in (10, 12, 15)]; print(flush=True)"
    command = [sys.executable, "-c", f"import signal, time; {deaf}; time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as srun:
        srun.stdout.readline()
        beside = threading.Thread(target=stand_by, args=(run.path, 0, srun.pid))
        beside.start()
        assert not is_silent(run, 0, 10)
        if left == "a result":
            run.write_own(run.result, {"state": "finished", "updates": 9})
        else:
            write_json(run.failure(0, 3), failure_of(3, "n1", ValueError("7")))
        assert srun.wait(10) == -signal.SIGKILL
        beside.join(10)
    assert is_silent(run, 0, 0.3)
