"""Faults injected into a process from outside, and lifted again."""

import signal
import subprocess
import sys

import psutil
import pytest

from orchestrator.health.faults import (
    FILL_DISK,
    FREEZE_NODE,
    KILL_NODE,
    KILL_RANK,
    KILL_TWO,
    FaultInjector,
    RankProcess,
)
from tests.helpers import until

RANK = """
import sys
file = open(sys.argv[1], "ab", buffering=0)
for line in sys.stdin:
    try:
        file.write(line.encode())
        print("written", flush=True)
    except OSError:
        print("full", flush=True)
"""


@pytest.fixture
def processes(tmp_path):
    """Four processes that write lines to files: an agent and its rank on each of two nodes."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path / str(number))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in range(4)
    ]  # fmt: skip
    yield started
    for process in started:
        process.kill()
        process.communicate()


def ranks_of(processes):
    pids = [process.pid for process in processes]
    return {3: RankProcess(pids[1], pids[0], "n0"), 5: RankProcess(pids[3], pids[2], "n1")}


def is_stopped(process):
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


def answer(process, line):
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_a_full_disk_is_full_until_there_is_room_again(processes, tmp_path):
    injector, rank = FaultInjector(), processes[1]
    assert answer(rank, "a") == "written"
    injector.inject(FILL_DISK, 0.0, ranks_of(processes))
    assert [answer(process, "b") for process in processes] == ["full"] * 4
    injector.lift()
    assert answer(rank, "c") == "written"
    assert (tmp_path / "1").read_text() == "a\nc\n"


def test_a_frozen_node_continues_when_the_fault_is_lifted(processes):
    injector = FaultInjector()
    injected = injector.inject(FREEZE_NODE, 0.9, ranks_of(processes))
    assert (injected.text, injected.gone) == ("freeze n1", {5})
    for process in processes[2:]:
        assert until(lambda p=process: is_stopped(p) or None, 5, "its stop")
    assert not any(map(is_stopped, processes[:2]))
    injector.lift()
    assert answer(processes[3], "a") == "written"


@pytest.mark.parametrize(
    ("kind", "text", "gone", "killed"),
    [
        (KILL_RANK, "kill rank 3", {3}, [1]),
        (KILL_TWO, "kill ranks 3 and 5", {3, 5}, [1, 3]),
        (KILL_NODE, "kill n0", {3}, [0, 1]),
    ],
)
def test_a_kill_hits_the_chosen_processes_alone(processes, kind, text, gone, killed):
    injected = FaultInjector().inject(kind, 0.0, ranks_of(processes))
    assert (injected.text, injected.gone) == (text, gone)
    for number in killed:
        assert processes[number].wait(5) == -signal.SIGKILL
    assert all(processes[n].poll() is None for n in range(4) if n not in killed)


def test_faults_in_processes_that_have_ended_are_none(processes):
    ranks = ranks_of(processes)
    for process in processes:
        process.kill()
        assert until(lambda p=process: p.poll() is not None or None, 5, "its end")
    injector = FaultInjector()
    for kind in (FILL_DISK, FREEZE_NODE, KILL_RANK):
        injector.inject(kind, 0.0, ranks)
    injector.lift()
    assert injector.inject(KILL_RANK, 0.0, {}).text == "kill a rank: none was left"
