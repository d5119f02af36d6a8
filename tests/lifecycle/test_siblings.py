"""A node's first rank finds the others that are stopped, among processes of one parent."""

import os
import signal
import subprocess
import sys

from tests.helpers import ROOT, until

FIRST = """
import sys, time
from orchestrator.lifecycle.siblings import Siblings, ranks_beside
siblings = Siblings(1, 0.5)
while (lost := siblings.lost()) is None:
    print(sorted(ranks_beside()), flush=True)
    time.sleep(0.1)
print(*lost, flush=True)
"""


def test_a_stopped_rank_is_found_among_the_children_of_one_parent_and_others_are_not():
    def begin(rank, step, *words):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "SLURM_PROCID": rank, "SLURM_STEP_ID": step}
        return subprocess.Popen([sys.executable, "-c", *words], env=env, stdout=subprocess.PIPE)

    sleep = "import time; time.sleep(600)"
    other, stranger = begin("3", "0", sleep), begin("3", "1", sleep)
    first = begin("2", "0", FIRST)
    try:
        assert first.stdout.readline() == b"[3]\n"
        os.kill(stranger.pid, signal.SIGSTOP)
        assert [first.stdout.readline() for _ in range(12)] == [b"[3]\n"] * 12
        os.kill(other.pid, signal.SIGSTOP)
        last = until(lambda: next((w for w in [first.stdout.readline()] if b"[" not in w), None))
        assert last == f"3 {other.pid}\n".encode()
    finally:
        for process in (first, other, stranger):
            process.kill()
            process.communicate()
