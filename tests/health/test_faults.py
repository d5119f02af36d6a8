"""What a hand does to a process of its own user, from outside: it does it, and takes it back."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from orchestrator.health.faults import FaultInjector
from tests.helpers import until

RANK = """
import os, socket, sys
file = open(sys.argv[2], "ab", buffering=0)
link = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
while word := link.recv(1):
    try:
        file.write(word)
    except OSError as error:
        word = b"!"
    link.sendall(word)
"""


@pytest.fixture
def rank(tmp_path):
    """A process that answers what it has written down, a hand over it, and our end of its link."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        process = subprocess.Popen([sys.executable, "-c", RANK, port, str(tmp_path / "file")])
        ours, _ = listener.accept()
    with process, ours:
        ours.settimeout(5)
        yield process, FaultInjector(lambda: {3: process.pid}), ours
        process.kill()


def answer(ours, word):
    ours.sendall(word)
    return ours.recv(1)


def test_a_full_disk_is_full_until_there_is_room_again(rank, tmp_path):
    _, hand, ours = rank
    assert answer(ours, b"a") == b"a"
    hand.fill([3])
    assert answer(ours, b"b") == b"!"
    hand.lift()
    assert answer(ours, b"c") == b"c"
    assert (tmp_path / "file").read_bytes() == b"ac"


def test_what_is_silenced_hears_nothing_until_it_is_lifted_and_what_is_cut_is_closed(rank):
    process, hand, ours = rank
    assert answer(ours, b"a") == b"a"
    ((here, there),) = hand.outward([3])
    assert (here, there) == (ours.getpeername(), ours.getsockname())
    hand.silence([[list(here), list(there)]], [3])
    ours.settimeout(0.3)
    with pytest.raises(TimeoutError):
        answer(ours, b"b")
    hand.lift()
    ours.settimeout(5)
    assert ours.recv(1) == b"b", "what was sent meanwhile was not acknowledged, so it comes again"
    open_before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # our own
    hand.cut([3])
    assert ours.recv(1) == b""
    assert process.wait(5) == 0
    assert len(os.listdir("/proc/self/fd")) == open_before  # noqa: PTH208  # our own


def test_what_is_done_to_one_that_has_ended_is_done_to_nobody(rank):
    process, hand, ours = rank
    hand.signal([3], signal.SIGKILL)
    assert until(lambda: process.poll() is not None or None, 5, "its end")
    for do in (hand.fill, hand.cut, hand.outward, lambda those: hand.signal(those, signal.SIGKILL)):
        do([3])
        do([4])
    hand.lift()
    assert ours.recv(1) == b""
