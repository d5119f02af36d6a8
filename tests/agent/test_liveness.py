"""Who stands still, who works, who is silent: judged with a clock that the test holds."""

import json
import os
import signal
import subprocess
import sys

import pytest

from orchestrator.agent.liveness import NodeWatch, Patience, Standstill
from orchestrator.agent.processes import descendants, state_of
from tests.helpers import until

PATIENCE = Patience(notice_s=10.0, most_s=30.0, hang_s=60.0)


class Watched:
    """A main thread of `Standstill`, second by second."""

    def __init__(self):
        self.now, self.since, self.standstill = 1000.0, 1000.0, Standstill(PATIENCE)

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
    """After how many seconds one that uses this share of a processor counts as hung."""
    one, used = Watched(), 0.0
    for second in range(1, 400):
        one.second()
        used += share
        if one.standstill.due(one.now) and one.standstill.hangs(one.now, used):
            return second
    return None


def test_who_uses_a_processor_never_hangs_and_who_uses_none_does():
    assert hung_after(1.0) is None
    assert hung_after(0.02) is None
    assert 60 < hung_after(0.0) < 75
    assert 60 < hung_after(0.005) < 75  # what looking at itself costs


def test_work_that_ends_in_a_hang_is_a_hang():
    one, used = Watched(), 0.0
    for second in range(300):
        one.second()
        used += second < 200
        if one.standstill.due(one.now) and one.standstill.hangs(one.now, used):
            assert 260 <= second < 270
            return
    raise AssertionError("it was never noticed")


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_children_are_found_and_what_they_do(child):
    assert child.pid in descendants(os.getpid())
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: state_of(child.pid) == "T", 5, "the stop")


class Node:
    def __init__(self, pid):
        self.now = 1000.0
        self.watch = NodeWatch(5.0, 60.0, clock=lambda: self.now)
        self.watch.joined(3, pid)

    def second(self):
        self.now += 1
        return self.watch.silent()


def test_who_says_nothing_and_does_nothing_is_silent_once(child):
    node = Node(child.pid)
    until(lambda: state_of(child.pid) == "S", 5, "sleep")
    assert [node.second() for _ in range(20)] == [[]] * 20  # it has not begun yet
    node.watch.hear(3, b"{}\n")
    assert [rank for _ in range(20) for rank in node.second()] == [3]


def test_who_said_its_last_word_or_computes_is_not_silent(child):
    node = Node(child.pid)
    node.watch.hear(3, json.dumps({"word": "finished"}).encode() + b"\n")
    assert not any(node.second() for _ in range(20))
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        node = Node(busy.pid)
        node.watch.hear(3, b"{}\n")
        for _ in range(8):
            used = node.watch.ranks[3].used_s
            until(lambda used=used: read(busy.pid) > used + 0.1, 20, "work")
            assert node.second() == []
    finally:
        busy.kill()
        busy.wait()


def read(pid):
    from orchestrator.agent.processes import processor_s

    return processor_s(pid)


def test_a_line_may_come_in_parts_and_a_watcher_that_stood_still_accuses_nobody(child):
    node = Node(child.pid)
    assert node.watch.hear(3, b'{"wo') == []
    assert node.watch.hear(3, b'rd": ""}\n{}\n') == [{"word": ""}, {}]
    node.now += 500
    assert node.second() == []
