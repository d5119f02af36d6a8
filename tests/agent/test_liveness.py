"""Liveness of workers: stopped processes, and the clock of the agent that looks."""

import os
import signal
import subprocess
import sys

import pytest

from orchestrator.agent.liveness import AwakeClock, WorkerLiveness
from orchestrator.agent.processes import state_of
from tests.helpers import until

pytestmark = pytest.mark.whole_runs


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_a_stopped_worker_is_told_apart_though_it_has_not_begun(child):
    signs = WorkerLiveness(child.pid)
    until(lambda: state_of(child.pid) == "S", 30, "sleep")
    assert signs.stopped_s(1000.0) is None
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: state_of(child.pid) == "T", 30, "the stop")
    assert [signs.stopped_s(1001.0 + n) for n in range(3)] == [0.0, 1.0, 2.0]
    os.kill(child.pid, signal.SIGCONT)
    until(lambda: state_of(child.pid) == "S", 30, "the continuation")
    assert signs.stopped_s(1004.0) is None


def test_a_suspension_of_the_process_that_judges_does_not_count():
    now = 1000.0
    clock = AwakeClock(lambda: now)
    for passed_s, counted_s in ((1.0, 1.0), (3.0, 3.0), (500.0, 0.0), (0.5, 0.5)):
        before, now = clock(), now + passed_s
        assert clock() - before == counted_s
