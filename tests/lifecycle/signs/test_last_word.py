"""Who ended without a last word: the shell that SLURM starts after each rank, as it is run."""

import fcntl
import os
import shlex
import subprocess

import pytest

from orchestrator.clusters.slurm.root_cause import blame_slurm
from orchestrator.lifecycle.signs.last_word import after_rank, say_last_word, wordless
from orchestrator.lifecycle.stopping.departure import await_verdict
from orchestrator.lifecycle.stopping.stop_signals import StopFlag
from orchestrator.lifecycle.topology import BATCH_COPY_VARIABLE, BATCH_PID_VARIABLE
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.start_from_copy import NAME

GONE = "exited with code 0 before its training had ended"


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "my run's")
    run.create()
    run.attempt(2).mkdir()
    return run


def said(capsys, attempt, word):
    say_last_word(attempt, word)
    return capsys.readouterr().out


def ended(run, rank, log, node="n1", **more):
    """What becomes of a rank's end in the second start of a job that began with attempt 1."""
    path = run.rank_log(rank)
    path.parent.mkdir(exist_ok=True)
    path.write_text(log)
    env = {
        "PATH": os.environ["PATH"], "SLURM_PROCID": str(rank), "SLURMD_NODENAME": node,
        "SLURM_RESTART_COUNT": "1", "ORCHESTRATOR_BASE_ATTEMPT": "1",
        **more,
    }  # fmt: skip
    script = after_rank(run, shlex.quote(str(run.path)))
    done = subprocess.run(["sh", "-c", script], env=env, capture_output=True, check=False)
    assert done.stdout == done.stderr == b""
    return wordless(run, 2)


@pytest.mark.parametrize("rank", [0, 7, 511, 512, 1999])
def test_who_said_a_last_word_in_this_attempt_is_not_written_down_and_others_are(run, rank, capsys):
    own, earlier = said(capsys, 2, "stopped"), said(capsys, 1, "stopped")
    assert ended(run, rank, f"update 3\n{own}") is None
    assert ended(run, rank, f"{own}{'a thread went on' * 9}\n") is None
    assert ended(run, rank, f"{earlier}update 4\n") == (rank, "n1")
    assert ended(run, rank + 1, "") == (rank, "n1")  # the first that did


def test_code_0_without_a_word_is_blamed_before_those_that_missed_its_rank(run):
    ended(run, 3, "")
    write_json(run.failure(2, 0), {"rank": 0, "node": "n0", "time": 1.0, "cause": "lost a peer",
                                   "usage": False, "secondary": True})  # fmt: skip
    run.srun_log(2).write_text(
        "srun: error: n0: task 0: Exited with exit code 1\nsrun: error: n0: task 1: Killed\n"
    )
    culprit = blame_slurm(run, 2, {}, 137)
    assert (culprit.rank, culprit.node) == (3, "n1")
    assert culprit.cause.startswith(GONE)
    with run.srun_log(2).open("a") as log:
        log.write("srun: error: n1: task 3: Killed\n")
    assert blame_slurm(run, 2, {3: "n1"}, 137).cause == "killed by signal 9 (SIGKILL)"
    run.srun_log(2).write_text("")  # srun was killed: it names nobody
    assert blame_slurm(run, 2, {}, 137).rank == 0


def test_who_lost_a_peer_that_left_without_a_word_does_not_wait_for_a_node_to_fall_silent(run):
    ended(run, 3, "")
    assert not await_verdict(run, 2, StopFlag(), 3600)  # or this test would not end
    write_json(run.departure(2), {"why": "preempted"})
    assert await_verdict(run, 2, StopFlag(), 3600)


def test_who_stood_still_is_blamed_before_those_that_gave_up_and_a_killed_rank_before_it(run):
    write_json(run.failure(2, 0), {"rank": 0, "node": "n0", "time": 1.0, "cause": "timed out",
                                   "usage": False, "secondary": True})  # fmt: skip
    for rank, since in ((1, 5.0), (2, 3.0)):
        write_json(run.behind(2, rank), {"rank": rank, "node": "n1", "since": since, "at": "in f",
                                         "where": "micro-step 1", "stack": ["in f"]})  # fmt: skip
    said = "srun: error: n0: task 0: Exited with exit code 1\n"
    run.srun_log(2).write_text(said + "srun: error: n1: tasks 1-2: Exited with exit code 1\n")
    culprit = blame_slurm(run, 2, {}, 1)
    assert (culprit.rank, culprit.node, culprit.log_tail) == (2, "n1", ("in f",))
    assert culprit.cause == "the others waited in vain: it was still at micro-step 1, in f"
    run.srun_log(2).write_text(said + "srun: error: n1: task 1: Killed\n")
    assert blame_slurm(run, 2, {1: "n1"}, 1).rank == 1


def test_the_last_rank_removes_the_code_unless_the_batch_script_is_there_to_go_on_with_it(
    run, tmp_path
):
    copy = tmp_path / f"{NAME}-{os.getuid()}-{'0' * 16}-7-1-n1"
    here = {
        "SLURM_JOB_ID": "7", "TMPDIR": str(tmp_path), BATCH_PID_VARIABLE: str(os.getpid()),
        BATCH_COPY_VARIABLE: f"n1:{tmp_path}",
    }  # fmt: skip
    with subprocess.Popen("true") as gone:
        pass

    def stays(**changed):
        copy.mkdir(exist_ok=True)
        ended(run, 0, "", **{**here, **changed})
        return copy.exists()

    assert stays()
    assert not stays(**{BATCH_PID_VARIABLE: str(gone.pid)})
    assert not stays(**{BATCH_COPY_VARIABLE: f"n0:{tmp_path}"})  # another node
    assert not stays(**{BATCH_COPY_VARIABLE: "n1:"})  # a preamble chose another folder
    assert not stays(**{BATCH_COPY_VARIABLE: "", BATCH_PID_VARIABLE: ""})  # in an allocation
    copy.mkdir()
    held = os.open(copy, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_SH)
    assert stays(**{BATCH_PID_VARIABLE: str(gone.pid)}), "another rank runs from it"
    os.close(held)
