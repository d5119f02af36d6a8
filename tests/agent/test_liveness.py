"""Liveness of workers (stopped, busy, silent), judged with a clock that the test controls."""

import os
import signal
import subprocess
import sys

import pytest

from orchestrator.agent.liveness import AwakeClock, ProgressWatchdog, WorkerLiveness
from orchestrator.agent.processes import processor_s, state_of
from tests.helpers import until


class Watched:
    """A main thread of `ProgressWatchdog`, second by second."""

    def __init__(self):
        self.now = self.since = 1000.0
        self.standstill = ProgressWatchdog(notice_s=10.0, most_s=30.0, hang_s=60.0)

    def second(self, *, waits=False):
        self.now += 1
        return self.standstill.look(self.now, self.since, waits=waits)

    def seconds(self, count, **more):
        return [words for _ in range(count) if (words := self.second(**more))]

    def moves(self):
        self.since = self.now


def test_who_stands_still_is_told_once_and_that_it_moves():
    one = Watched()
    assert one.seconds(10) == []
    assert one.second() == "behind"
    assert one.seconds(100) == []
    one.moves()
    assert one.second() == "moves"


def test_who_waits_for_others_is_never_told():
    assert Watched().seconds(1000, waits=True) == []


@pytest.mark.parametrize(("usual", "told_after"), [(2, 11), (5, 16), (8, 25), (100, 31)])
def test_what_was_usual_counts_up_to_a_limit(usual, told_after):
    one = Watched()
    one.seconds(usual)
    one.moves()
    one.second()
    found = [second for second in range(2, 200) if one.second() == "behind"]
    assert found == [told_after]


def hung_after(share):
    """After how many seconds one that uses this share of a processor in a second counts as hung."""
    one, used = Watched(), 0.0
    for second in range(1, 400):
        one.second()
        used += share(second)
        if one.standstill.due(one.now) and one.standstill.idle.hangs(one.now, used):
            return second
    return None


def test_who_uses_a_processor_does_not_hang_and_who_uses_none_does():
    assert hung_after(lambda _: 1.0) is None
    assert hung_after(lambda _: 0.02) is None
    assert 60 < hung_after(lambda _: 0.0) < 75
    assert 60 < hung_after(lambda _: 0.005) < 75  # what looking at itself costs
    assert 260 < hung_after(lambda second: second < 200) < 275  # work that ends in a hang


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


class Node:
    """The watch of a node over a process, with a clock that the test sets."""

    def __init__(self, pid):
        self.now, self.signs = 1000.0, WorkerLiveness(pid)

    def receive(self, message):
        self.signs.receive(message, self.now)

    def second(self):
        self.now += 1
        return self.signs.unresponsive(self.now)


def test_a_worker_that_sends_nothing_and_does_nothing_is_silent(child):
    node = Node(child.pid)
    until(lambda: state_of(child.pid) == "S", 30, "sleep")
    assert [node.second() for _ in range(20)] == [None] * 20  # it has not begun yet
    node.receive({})
    assert [node.second() for _ in range(5)] == [None, *(("silent", n) for n in (2, 3, 4, 5))]
    node.receive({"final_state": "finished"})
    assert not any(node.second() for _ in range(20))


def test_a_worker_that_computes_is_busy():
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        node = Node(busy.pid)
        node.receive({})
        node.second()
        for seconds in range(2, 10):
            used = node.signs.used_s
            until(lambda used=used: processor_s(busy.pid) > used + 0.1, 20, "work")
            assert node.second() == ("busy", seconds)
    finally:
        busy.kill()
        busy.wait()


def test_a_stopped_worker_is_told_apart_though_it_has_not_begun(child):
    node = Node(child.pid)
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: state_of(child.pid) == "T", 30, "the stop")
    assert [node.second() for _ in range(3)] == [("stopped", n) for n in (0, 1, 2)]
    os.kill(child.pid, signal.SIGCONT)
    until(lambda: state_of(child.pid) == "S", 30, "the continuation")
    assert node.second() is None


def test_a_suspension_of_the_process_that_judges_does_not_count():
    now = 1000.0
    clock = AwakeClock(lambda: now)
    for passed_s, counted_s in ((1.0, 1.0), (3.0, 3.0), (500.0, 0.0), (0.5, 0.5)):
        before, now = clock(), now + passed_s
        assert clock() - before == counted_s
