"""What is asked of SLURM's commands and made of their answers: with stand-ins for them on PATH."""

import os
import tempfile

import pytest

from orchestrator.cli.status import statuses
from orchestrator.clusters.slurm.queue.sbatch import queue
from orchestrator.errors import ClusterError
from orchestrator.rundir.files import write_json
from tests.rundir.test_files import made

HELD = "7|PENDING||1:00|0:00|N/A|launch failed requeued held|/x.sh"


@pytest.fixture
def say(tmp_path, monkeypatch):
    """Make a command that says something; and the list of all calls so far, a line each."""
    programs, calls = tmp_path / "bin", tmp_path / "calls"
    programs.mkdir()
    calls.touch()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_RUNTIME_DIR", tempfile.mkdtemp(dir=tmp_path))
    monkeypatch.delenv("SLURM_CONF", raising=False)

    def say(command, answer):
        program = programs / command
        program.write_text(
            f'#!/bin/sh\necho "{command} $*" >>{calls}\nenv | grep ^SQUEUE_ >>{calls}\n'
            f"cat <<'END'\n{answer}\nEND\n"
        )
        program.chmod(0o755)
        return lambda: calls.read_text().splitlines()

    return say


@pytest.fixture
def submitted(tmp_path):
    """A run that was submitted as job 7, some time ago."""
    run = made(tmp_path / "run")
    write_json(run.handle, {"kind": "slurm", "job_id": "7", "attempt": 0, "slurm_conf": None})
    for place in (run.path, run.attempts):
        os.utime(place, (1.0, 1.0))
    return run


def test_status_in_many_shells_asks_once_and_again_when_a_folder_has_changed(submitted, say):
    calls = say("squeue", "7|RUNNING|n0|1:00|0:00|1|None|/x.sh\n8|PENDING||1:00|0:00|1|None|/y.sh")
    for _ in range(5):  # what they share is a file, so it is all the same whose process it is
        (found,), sentences = statuses([submitted])
        assert (found.state, found.reason, sentences) == ("starting", None, [])
    assert len(calls()) == 1
    submitted.cancel.touch()
    statuses([submitted])
    assert len(calls()) == 2


def test_a_persons_own_filters_hide_no_job(submitted, say, monkeypatch):
    calls = say("squeue", "7|RUNNING|n0|1:00|0:00|1|None|/x.sh")
    monkeypatch.setenv("SQUEUE_PARTITION", "debug")
    statuses([submitted])
    assert len(calls()) == 1


def test_a_job_that_no_node_could_start_is_said_to_wait_for_a_person(submitted, say):
    say("squeue", HELD)
    (found,), _ = statuses([submitted])
    assert found.state == "pending"
    assert "a node could not start it, and it waits until you say `scontrol release 7`" in (
        found.reason
    )


def test_a_job_that_is_held_after_its_runs_end_is_taken_out_of_the_queue(submitted, say):
    calls = say("squeue", HELD)
    say("scancel", "")
    submitted.write_own(submitted.result, {"state": "finished", "updates": 3})
    (found,), (sentence,) = statuses([submitted])
    assert found.state == "finished"
    assert sentence.endswith("(launch failed requeued held); it is taken out of the queue")
    assert [call for call in calls() if call.startswith("scancel")] == ["scancel 7"]


@pytest.mark.parametrize(("answer", "accepted"), [("7", True), ("7;own", True), ("7;far", False)])
def test_a_job_on_another_cluster_of_a_federation_is_cancelled_and_refused(
    tmp_path, say, answer, accepted
):
    calls = say("sbatch", answer)
    say("scontrol", "ClusterName             = own")
    say("scancel", "")
    run = made(tmp_path / "run")
    if accepted:
        assert queue(run, tmp_path / "000.sh", 0, None) == "7"
        assert run.read_handle()["job_id"] == "7"
        return
    with pytest.raises(ClusterError, match="Submit it on a login node of far"):
        queue(run, tmp_path / "000.sh", 0, None)
    assert calls()[-1] == "scancel --clusters=far 7"
    assert not run.may_be_queued
