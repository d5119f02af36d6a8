"""A real file system that is full to the end of the run; for a while it is in `test_growth.py`."""

import re
import subprocess

import pytest

from tests import helpers
from tests.helpers import LIMIT_S, SMALL, TINY
from tests.hold import Hold

pytestmark = pytest.mark.whole_runs

LONG = (
    TINY,
    SMALL,
    "train.updates=120",
    "accumulation.global_batch=24",
    "accumulation.steps=2",
    "train.checkpoint_every=10",
    "train.evaluate_every=0",
    "job.dropout=0.5",
)


def test_a_full_disk_under_what_the_command_prints_ends_no_run(disk, tmp_path):
    log, run, hold = disk.folder / "log", tmp_path / "run", Hold(tmp_path / "hold").hold_before(12)
    line = helpers.command(*LONG, "train.updates=60", hold.override, f"run.dir={run}")
    with log.open("ab") as file:
        process = subprocess.Popen(line, stdout=file, stderr=file, env=helpers.environment())
    hold.wait_until_held(12, (0, 1))
    with log.open("ab") as file:  # to the end of its last page
        file.write(b" " * (-log.stat().st_size % 4096))
    disk.fill()
    hold.release()
    assert process.wait(120) == 0
    assert helpers.result(run)["state"] == "finished"
    assert "finished" not in log.read_text()


def test_run_on_a_full_disk_fails_and_resumes(disk, tmp_path):
    run = disk.folder / "run"
    hold = Hold(tmp_path / "hold").hold_before(12)
    process = helpers.begin(*LONG, "train.updates=60", hold.override, f"run.dir={run}")
    hold.wait_until_held(12, (0, 1))
    disk.fill()
    hold.release()
    output = helpers.await_exit(process, 1, timeout=LIMIT_S)
    assert "Traceback" not in output
    assert "rank 0 on node0 failed first: trained to the end, but the checkpoint after" in output
    assert re.search(
        r"No space left on device( \(os error \d+\))?; make room, and resume", output
    ), output
    assert not (run / "result.json").exists()
    disk.make_room()
    helpers.verb("resume", run, code=0)
    assert helpers.result(run)["state"] == "finished"
