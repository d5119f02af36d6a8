"""Lines and logs where there is no room, by a limit of the process's own."""

import os
import resource
import signal
import subprocess
import sys

import pytest

from orchestrator.rundir.files import LineFile
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
