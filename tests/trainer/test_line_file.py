"""Lines and logs: whole where there is no room."""

import errno
import json
import os
import resource
import signal

import pytest

from orchestrator.client.loop import CompletedUpdate, update_line
from orchestrator.engine.api import BoundaryReport
from orchestrator.rundir import files
from orchestrator.rundir.files import LineFile
from orchestrator.rundir.metrics import _numbers_of_update
from orchestrator.trainer.recorder import log_evaluation, log_update
from tests.engine.windows import make_window
from tests.helpers import run_python

pytestmark = pytest.mark.whole_runs


@pytest.fixture
def limit():
    """Sets how many bytes a file may have, as a disk without room would."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)


@pytest.mark.parametrize("room", range(40, 61))
def test_every_line_is_there_once_whole_and_in_order_wherever_the_room_ended(tmp_path, limit, room):
    file = LineFile(tmp_path / "lines")
    limit(room)
    for number in range(8):
        try:
            file.write(f"line {number:05d}")
        except OSError:
            assert number >= 3
        text = (tmp_path / "lines").read_text()
        assert text.splitlines() == [f"line {n:05d}" for n in range(len(text) // 11)]
    assert file.waiting
    limit(10_000)
    file.write("line 00008")
    file.close()
    assert (tmp_path / "lines").read_text().split("\n")[:-1] == [f"line {n:05d}" for n in range(9)]
    assert (tmp_path / "lines").stat().st_mode & 0o777 == 0o600


def test_a_file_that_there_was_no_room_to_make_gets_all_lines_later(tmp_path, monkeypatch):
    def no_room(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(files, "open_nofollow", no_room)
        file = LineFile(tmp_path / "lines")
        with pytest.raises(OSError, match="No space left"):
            file.write("first")
    file.write("second")
    file.close()
    assert (tmp_path / "lines").read_text() == "first\nsecond\n"


def test_a_file_whose_handle_is_stale_is_opened_again(tmp_path, monkeypatch):
    file = LineFile(tmp_path / "lines")
    file.write("first")
    stale, real = file._descriptor, os.fstat

    def fstat(descriptor):
        if descriptor == stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(descriptor)

    with monkeypatch.context() as replaced:
        replaced.setattr(os, "fstat", fstat)
        with pytest.raises(OSError, match="Stale"):
            file.write("second")
        other = os.open(tmp_path, os.O_RDONLY)  # has the old number now
        file.write("third")
        file.close()
        os.close(other)
    assert (tmp_path / "lines").read_text() == "first\nsecond\nthird\n"


PROGRAM = """
import resource, signal, sys
from pathlib import Path
from orchestrator.agent.rank_log import send_output_to
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
send_output_to(Path(sys.argv[1]), "node0 rank 0")
print("first")
most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (6, most))
print("lost line")
print("lost too", file=sys.stderr)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
print("second")
print("third", file=sys.stderr)
"""


def test_a_log_without_room_ends_nothing_and_says_later_what_it_lost(tmp_path):
    log = tmp_path / "log"
    run_python(PROGRAM, log)
    assert log.read_text().splitlines() == [
        "first",
        "[10 bytes of this log were lost: File too large]",
        "second",
        "[9 bytes of this log were lost: File too large]",
        "third",
    ]


def _done(update, seconds=0.6):
    window = make_window(update, [(0, 30)], rate=1e-3)
    return CompletedUpdate(window, BoundaryReport(update=update, loss=0.25, weight=30.0), seconds)


def test_a_line_has_the_loss_the_rate_and_the_speed_of_an_update(capsys):
    log_update(_done(1), 10)
    log_evaluation(1, {"accuracy": 0.5})
    log_evaluation(1, {})
    assert capsys.readouterr().out.splitlines() == [
        "update 2/10  loss 0.2500  learning rate 0.001  50.0 samples/s",
        "held-out after update 2: accuracy 0.5000",
    ]


def test_a_full_disk_is_no_reason_to_stop(monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("builtins.print", full)
    log_update(_done(0), 10)


def test_the_numbers_of_an_updates_line_are_known_without_parsing_it():
    line = json.dumps({**update_line(_done(4), 1024), "attempt": 2}) + "\n"
    assert _numbers_of_update(line.encode()) == (4, 2)
