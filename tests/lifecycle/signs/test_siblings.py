"""The ranks of a node watch each other in a ring: children of one parent, with shared beats."""

import os
import signal
import subprocess
import sys

import pytest

from orchestrator.lifecycle.signs.siblings import Beats, Siblings
from tests.helpers import ROOT, until

RANK = """
import ctypes, os, sys, threading, time
from pathlib import Path
from orchestrator.lifecycle.signs.siblings import Siblings
local, folder = int(sys.argv[1]), Path(sys.argv[2])
siblings = Siblings([2, 5, 9], local, "node", 3.0, 300.0, folder=folder)
def live():
    words = f"in step {local}"
    siblings.beat(words)
    print("begun", flush=True)
    while (lost := siblings.beat(words)) is None:
        time.sleep(0.1)
    print(*lost, flush=True)
threading.Thread(target=live, daemon=True).start()
sys.stdin.readline()
ctypes.PyDLL(None).sleep(600)  # holds the interpreter
"""


@pytest.fixture
def ring(tmp_path):
    """Three ranks, and one of another step that is stopped all the time."""

    def begin(rank, step, *words):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "SLURM_PROCID": rank, "SLURM_STEP_ID": step}
        return subprocess.Popen([sys.executable, "-c", RANK, *words], env=env,
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip

    made = [begin(rank, "0", str(local), str(tmp_path)) for local, rank in enumerate("259")]
    stranger = begin("5", "1", "0", str(tmp_path / "elsewhere"))
    os.kill(stranger.pid, signal.SIGSTOP)
    assert {process.stdout.readline() for process in made} == {b"begun\n"}
    until(lambda: not list(tmp_path.iterdir()), 60, "all beats")  # the name is gone
    yield made
    for process in (*made, stranger):
        process.kill()
        process.communicate()


@pytest.mark.parametrize("how", ["stopped", "holds the interpreter"])
def test_who_gives_no_sign_of_life_is_found_by_the_one_before_it(ring, how):
    first, second, third = ring
    if how == "stopped":
        os.kill(first.pid, signal.SIGSTOP)
    else:
        first.stdin.write(b"\n")
        first.stdin.flush()
    assert third.stdout.readline() == f"2 {first.pid} in step 0\n".encode()
    assert second.poll() is None


def test_who_has_ended_is_not_lost(ring):
    first, second, third = ring
    second.kill()
    second.wait()
    os.kill(first.pid, signal.SIGSTOP)  # nobody looks at the third: so it is as it was
    assert third.stdout.readline() == f"2 {first.pid} in step 0\n".encode()


def test_beats_are_shared_and_only_with_files_of_ones_own(tmp_path):
    one, other = (Beats(tmp_path / "node", 2) for _ in range(2))
    one.beat(0)
    assert [other.of(0), other.of(1)] == [1, 0]
    other.beat(1)
    assert not (tmp_path / "node").exists()
    one.beat(1)
    assert other.of(1) == 2
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(Exception, match="link"):
        Siblings([0, 1], 0, "link", 1.0, 1.0, folder=tmp_path)
    assert not (tmp_path / "target").exists()
