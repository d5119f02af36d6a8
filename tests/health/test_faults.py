"""Faults injected into processes from outside."""

import signal
import subprocess

import psutil
import pytest

from orchestrator.health.faults import (
    FREEZE_NODE,
    KILL_NODE,
    KILL_RANK,
    KILL_TWO,
    RankProcess,
    inject,
)
from tests.helpers import until


@pytest.fixture
def processes():
    """Four processes: an agent and its rank on each of two nodes."""
    started = [subprocess.Popen(["sleep", "600"]) for _ in range(4)]
    yield started
    for process in started:
        process.kill()
        process.wait()


def ranks_of(processes):
    pids = [process.pid for process in processes]
    return {3: RankProcess(pids[1], pids[0], "n0"), 5: RankProcess(pids[3], pids[2], "n1")}


def test_a_frozen_node_stops_with_its_agent(processes):
    injected = inject(FREEZE_NODE, 0.9, ranks_of(processes))
    assert (injected.text, injected.gone) == ("freeze n1", {5})
    stopped = [psutil.Process(process.pid) for process in processes[2:]]
    until(lambda: all(one.status() == psutil.STATUS_STOPPED for one in stopped), 30, "their stop")


@pytest.mark.parametrize(
    ("kind", "text", "gone", "killed"),
    [
        (KILL_RANK, "kill rank 3", {3}, [1]),
        (KILL_TWO, "kill ranks 3 and 5", {3, 5}, [1, 3]),
        (KILL_NODE, "kill n0", {3}, [0, 1]),
    ],
)
def test_a_kill_hits_the_chosen_processes_alone(processes, kind, text, gone, killed):
    injected = inject(kind, 0.0, ranks_of(processes))
    assert (injected.text, injected.gone) == (text, gone)
    for number in killed:
        assert processes[number].wait(30) == -signal.SIGKILL
    assert all(processes[n].poll() is None for n in range(4) if n not in killed)


def test_faults_in_processes_that_have_ended_are_none(processes):
    ranks = ranks_of(processes)
    for process in processes:
        process.kill()
        process.wait()
    inject(KILL_NODE, 0.0, ranks)
    assert inject(KILL_RANK, 0.0, {}).text == "kill a rank: none was left"
