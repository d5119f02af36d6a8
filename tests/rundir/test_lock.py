"""A signal goes to the launcher of this run, or to no process."""

import fcntl
import os
import signal
import subprocess
import sys

import pytest

from orchestrator.errors import ClusterError, RunFolderError
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.lock import is_locked, locked, signal_holder
from orchestrator.rundir.status import correct_by_lock, from_folder
from tests.helpers import until
from tests.run_folders import make_run

HOLD = """
import signal, sys, time
from pathlib import Path
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.lock import locked
with locked(RunDir(Path(sys.argv[1]))):
    print("locked", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path)


@pytest.fixture
def bystander():
    """A process that must live on."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    assert process.poll() is None
    process.kill()
    process.wait()


def test_the_holder_of_a_run_gets_the_signal(run):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.path)], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "locked\n"
        with (
            pytest.raises(RunFolderError, match=f"in progress .process {process.pid} on"),
            locked(run),
        ):
            raise AssertionError("it was locked twice")
        assert is_locked(run)
        signal_holder(run, signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
    until(lambda: not is_locked(run))
    with pytest.raises(ClusterError, match="nothing to cancel"):
        signal_holder(run, signal.SIGTERM)


def of(pid, host=None):
    return f"{pid} {host or os.uname().nodename}"


@pytest.mark.parametrize(
    "words", [str, of, lambda pid: of(pid, host="another-host"), lambda _: of(0), lambda _: ""]
)
def test_a_process_named_in_a_lock_that_it_does_not_hold_gets_no_signal(run, bystander, words):
    """This test locks the file itself, as a process might that wants another one ended."""
    run.lock.write_text(words(bystander.pid))
    with run.lock.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ClusterError, match=r"nothing was sent|cancel it there"):
            signal_holder(run, signal.SIGKILL)


def test_a_free_lock_causes_no_signal(run, bystander):
    run.lock.write_text(of(bystander.pid))
    with pytest.raises(ClusterError, match="nothing to cancel"):
        signal_holder(run, signal.SIGKILL)
    run.lock.unlink()
    run.lock.symlink_to(run.path / "elsewhere")
    with pytest.raises(RunFolderError, match="is a link"):
        signal_holder(run, signal.SIGKILL)


def test_a_run_that_ends_while_its_status_is_read_is_not_called_lost(run):
    made = make_run(run.path / "run")
    before = from_folder(made)
    write_json(made.result, {"state": "finished", "updates": 3})
    assert correct_by_lock(made, before).state == "finished"
