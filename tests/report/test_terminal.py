"""Standard streams that other programs have left in unusual states."""

import os
import pty
import subprocess
import sys

import psutil

from tests.helpers import environment, until

LINES = 3000
WRITES = f"""
import sys
from rich.console import Console
from orchestrator.report.terminal import exit_on_broken_pipe
with exit_on_broken_pipe():
    for number in range({LINES}):
        Console().print(f"line {{number}} of a long log", highlight=False)
"""


def test_a_terminal_that_was_left_non_blocking_is_waited_for(tmp_path):
    """As one is while a person has stopped it by Ctrl-S."""
    reader, terminal = pty.openpty()
    os.set_blocking(terminal, False)
    errors = tmp_path / "errors"
    with errors.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", WRITES], stdout=terminal, stderr=file, env=environment()
        )
    os.close(terminal)
    content = os.read(reader, 1)  # it has begun, and then has all the room that there is
    waits = psutil.STATUS_SLEEPING
    until(lambda: process.poll() is not None or psutil.Process(process.pid).status() == waits)
    try:
        while block := os.read(reader, 1 << 16):
            content += block
    except OSError:  # how Linux says that the last process has closed the terminal
        pass
    os.close(reader)
    assert process.wait() == 0, errors.read_text()
    lines = content.decode().splitlines()
    assert lines == [f"line {number} of a long log" for number in range(LINES)]
