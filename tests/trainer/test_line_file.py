"""Lines and logs: whole where there is no room, and few."""

import errno
import os
import resource
import signal
import subprocess
import sys

import pytest

from orchestrator.rundir import files
from orchestrator.rundir.files import LineFile
from orchestrator.trainer.recorder import UpdateLines
from tests.helpers import ROOT


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
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, log], check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0
    assert log.read_text().splitlines() == [
        "first",
        "[10 bytes of this log were lost: File too large]",
        "second",
        "[9 bytes of this log were lost: File too large]",
        "third",
    ]


@pytest.mark.parametrize(
    ("update_s", "hours", "at_most"), [(0.05, 1, 800), (1.0, 24, 2600), (600.0, 24, 144)]
)
def test_lines_are_few_for_updates_of_any_length(capsys, update_s, hours, at_most):
    now = [0.0]
    total = int(hours * 3600 / update_s)
    lines = UpdateLines(total, clock=lambda: now[0])
    longest = last = 0.0
    for update in range(total):
        now[0] += update_s
        lines.update(update, loss=0.5, learning_rate=0.1, samples=10)
        if capsys.readouterr().out:
            longest, last = max(longest, now[0] - last), now[0]
            at_most -= 1
    assert at_most >= 0
    assert longest <= 60.0 + update_s
    assert last == now[0]


def test_a_line_has_the_loss_the_rate_and_the_speed_since_the_line_before(capsys):
    now = [0.0]
    lines = UpdateLines(10, clock=lambda: now[0])
    for update in range(3):
        now[0] += 0.6
        lines.update(update, loss=0.25, learning_rate=1e-3, samples=30)
    assert capsys.readouterr().out.splitlines() == [
        "update 1/10  loss 0.2500  learning rate 0.001  50.0 samples/s",
        "update 3/10  loss 0.2500  learning rate 0.001  50.0 samples/s",
    ]


def test_evaluations_are_thinned_like_updates_and_the_last_is_told(capsys):
    now = [0.0]
    lines = UpdateLines(100, clock=lambda: now[0])
    for update in range(100):
        now[0] += 0.1
        lines.evaluation(update, {"accuracy": 0.5})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 12
    assert lines[-1] == "held-out after update 100: accuracy 0.5000"


def test_a_full_disk_is_no_reason_to_stop(monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("builtins.print", full)
    UpdateLines(10).update(0, loss=0.25, learning_rate=1e-3, samples=30)
