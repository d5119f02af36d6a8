"""The first rank that fails ends the run at once, is named, and nothing is left running."""

import shutil
import signal
import time

import pytest

from tests import helpers
from tests.helpers import LIMIT_S, SMALL, TINY
from tests.hold import begin_held, request_stop

pytestmark = [pytest.mark.whole_runs, pytest.mark.long]

SLOW = (
    TINY,
    "job.pause_s=0.05",
    "train.updates=400",
    "accumulation.global_batch=40",
    "run.survive=false",
)

FEW = (SMALL, "train.updates=40", "train.checkpoint_every=5", "job.dropout=0.5", "job.pause_s=0")


def test_failing_child_process_and_unprintable_error(
    tmp_path,
):
    begun = {
        fault: helpers.begin(
            TINY, SMALL, "train.updates=20", f"job.fault={fault}", f"run.dir={tmp_path / fault}"
        )
        for fault in ("fork", "mute")
    }
    said = {fault: process.communicate(timeout=LIMIT_S)[0] for fault, process in begun.items()}
    assert begun["fork"].returncode == 0, said["fork"]
    assert helpers.result(tmp_path / "fork")["state"] == "finished"
    assert not list((tmp_path / "fork").rglob("failure-*.json"))
    log = (tmp_path / "fork" / "logs" / "rank-00001.log").read_text()
    assert "ValueError: of a child" in log
    assert "ended: failed" not in log
    assert begun["mute"].returncode == 1
    culprit = helpers.result(tmp_path / "mute")["culprit"]
    assert culprit["rank"] == 1
    assert culprit["cause"].startswith("Mute: what it says cannot be printed (ValueError), at ")
    assert "tests/faulty_job.py:" in culprit["cause"]  # the user's own line
    log = (tmp_path / "mute" / "logs" / "rank-00001.log").read_text()
    assert "orchestrator/trainer/" not in log.rpartition("Traceback")[2]


def test_drifting_rank_fails_the_run(run):
    helpers.call(
        TINY,
        f"run.dir={run}",
        "job.fault=drift",
        "job.fault_rank=2",
        "job.fault_after=4",
        "train.updates=20",
        "train.checkpoint_every=2",
        "accumulation.steps=2",
        code=1,
    )
    found = helpers.result(run)
    assert (found["state"], found["culprit"]["rank"]) == ("failed", 2)
    assert "the weights of rank 2 are no longer those of most ranks" in found["culprit"]["cause"]
    assert "first in parameter 0.weight" in found["culprit"]["cause"]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == []


def test_stopped_by_a_signal_resumed_and_killed_a_run_ends_with_the_same_bits(run, tmp_path):
    process, hold = begin_held(run, 7, *SLOW, *FEW)
    request_stop(run, lambda: process.send_signal(signal.SIGTERM))
    hold.release()
    helpers.await_exit(process, 3)
    assert helpers.result(run)["state"] == "stopped"
    assert not helpers.processes_of(run)
    killed_at = helpers.records(run)[-1]["update"] + 6
    hold.hold_before(killed_at)
    resumed = helpers.begin("resume", run, module="orchestrator")
    hold.wait_until_held(killed_at, (0, 1))
    resumed.kill()
    resumed.communicate()
    hold.release()
    helpers.until(lambda: not helpers.processes_of(run), what="the end of all processes")
    helpers.verb("resume", run, code=0)
    assert {record["attempt"] for record in helpers.records(run)} == {0, 1, 2}
    undisturbed = tmp_path / "undisturbed"
    helpers.call(*SLOW, *FEW, f"run.dir={undisturbed}", code=0)
    assert helpers.compare(run, undisturbed)["equal_bits"]
    assert helpers.result(run)["collectives"] == helpers.result(undisturbed)["collectives"] == 40


@pytest.mark.parametrize("delay_s", [0.3, 0.8, 1.4, 2.2])
def test_an_interrupt_at_any_moment_of_the_start_ends_cleanly(run, delay_s):
    process = helpers.begin_anew(*SLOW, SMALL, f"run.dir={run}")
    time.sleep(delay_s)  # the moment is the subject of the test
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=LIMIT_S)
    # On a slow machine Python itself has not started after 0.3 s.
    if process.returncode != -signal.SIGINT and "Could not import runpy module" not in output:
        assert process.returncode in (3, 130), output
        assert "Traceback" not in output
    helpers.until(lambda: not helpers.processes_of(run), what="the end of all processes")


@pytest.mark.parametrize("ends_first", [False, True], ids=["it is noticed", "the training ends"])
def test_a_folder_deleted_in_mid_run_ends_it_with_one_message(run, ends_first):
    process, hold = begin_held(run, 7, *SLOW, *FEW, "run.max_restarts=2")
    shutil.rmtree(run)
    if ends_first:
        hold.release()
    output = helpers.await_exit(process, 1)  # the ranks are held until they are ended
    gone = f"error: the run folder {run} was removed or renamed while the run was using it"
    assert " ".join(output.split()).endswith(gone), output
    assert "cannot be written" not in output
    assert "Traceback" not in output
    assert not helpers.processes_of(run)
    assert not run.exists()
