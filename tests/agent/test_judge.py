"""The judge of life, by a clock and by work that the test controls."""

import subprocess
import sys
import threading

import pytest

from orchestrator.agent.judge import Limits, ProgramJudge, Standing, Work, WorkerJudge
from orchestrator.agent.liveness import RankPosition
from orchestrator.agent.processes import processor_s
from orchestrator.engine.common import waiting
from tests.helpers import until

pytestmark = pytest.mark.whole_runs

LIMITS = Limits(notice_s=10.0, latest_s=30.0, hang_s=60.0)


class Judged:
    """A worker, second by second.

    Attributes:
        processor, io: its work so far.
        since: when it came to its position.
        received: when its last report came.
    """

    def __init__(self):
        self.now = self.since = 1000.0
        self.judge, self.processor, self.io = WorkerJudge(LIMITS), 0.0, 0
        self.position, self.received = {}, None

    def second(self, *, processor=0.0, io=0, silent=False):
        self.now += 1
        self.processor += processor
        self.io += io
        if not silent:
            self.received = self.now
        position = {"stood_s": self.received - self.since, **self.position}
        return self.judge.observe(
            self.now,
            RankPosition(**position),
            self.now - self.received,
            lambda: Work(self.processor, self.io),
        )

    def seconds(self, count, **more):
        return [self.second(**more) for _ in range(count)]

    def moves(self):
        self.since = self.now


def changes(standings):
    """Each standing once, as long as it lasts."""
    return [one for n, one in enumerate(standings) if n == 0 or standings[n - 1] is not one]


def test_a_rank_that_computes_on_and_on_is_busy_and_never_hangs():
    one = Judged()
    assert changes(one.seconds(3000, processor=1.0)) == [Standing.MOVES, Standing.BUSY]
    assert not one.judge.hangs
    one.moves()
    assert one.second() is Standing.MOVES


def test_an_idle_rank_hangs_after_the_limit_and_not_before():
    one = Judged()
    assert changes(one.seconds(69)) == [Standing.MOVES, Standing.BUSY, Standing.IDLE]
    assert not one.judge.hangs
    one.seconds(3)
    assert one.judge.hangs


@pytest.mark.parametrize("more", [{"io": 1}, {"processor": 0.02}])
def test_a_rank_of_which_anything_moves_does_not_hang(more):
    one = Judged()
    one.seconds(3000, **more)
    assert one.judge.standing is Standing.BUSY
    assert not one.judge.hangs


def test_what_heartbeats_cost_is_no_work():
    one = Judged()
    one.seconds(100, processor=0.005)
    assert one.judge.hangs


def test_a_second_of_work_after_a_long_rest_is_work():
    one = Judged()
    one.seconds(65)
    one.second(processor=0.5)
    assert one.judge.standing is Standing.BUSY
    one.seconds(59)
    assert not one.judge.hangs
    one.seconds(5)
    assert one.judge.hangs


def test_declared_work_never_hangs_and_counts_for_nothing_afterwards():
    one = Judged()
    one.position = {"declared": "it saves"}
    assert changes(one.seconds(5000)) == [Standing.MOVES, Standing.DECLARED]
    assert not one.judge.hangs
    one.position = {}
    one.seconds(55)
    assert not one.judge.hangs, "the disk's time is not the job's"


def test_a_rank_that_waits_for_others_is_never_behind():
    one = Judged()
    for second in range(1, 1000):
        one.position = {"waited_s": float(second)}
        expected = Standing.WAITS if second >= 10 else Standing.MOVES
        assert one.second() is expected
    one.position = {}
    one.moves()
    assert one.second() is Standing.MOVES


def test_a_rank_that_sends_nothing_is_judged_by_its_work():
    """Code that holds Python's interpreter, while it computes and while it waits."""
    one = Judged()
    one.second()
    assert changes(one.seconds(1000, silent=True, processor=1.0)) == [
        Standing.MOVES,
        Standing.BUSY,
    ]
    one.seconds(65, silent=True)
    assert one.judge.hangs


@pytest.mark.parametrize(("usual", "after"), [(2, 11), (5, 16), (8, 25), (100, 31)])
def test_what_was_usual_counts_up_to_a_limit(usual, after):
    one = Judged()
    one.seconds(usual, processor=1.0)
    one.moves()
    found = [s for s in range(1, 200) if one.second(processor=1.0) is Standing.BUSY]
    assert found[0] == after


class JudgedProgram:
    def __init__(self):
        self.now, self.judge = 1000.0, ProgramJudge(LIMITS, 1000.0)
        self.lines, self.processor = 0, 0.0

    def seconds(self, count, *, every=0, processor=0.0, done=False, wakes=False):
        found = []
        for second in range(count):
            self.now += 1
            self.processor += processor
            self.lines += bool(every) and second % every == 0
            work = Work(self.processor, 0)
            waits = int(self.now) if wakes else 0
            found.append(self.judge.observe(self.now, (self.lines,), work, done=done, waits=waits))
        return changes(found)


def test_a_program_of_which_nothing_moves_is_idle():
    one = JudgedProgram()
    assert one.seconds(1000) == [Standing.MOVES, Standing.IDLE]
    assert one.seconds(1000, every=5) == [Standing.MOVES]


def test_a_program_that_computes_without_its_usual_output_is_busy():
    one = JudgedProgram()
    one.seconds(2000, every=100, processor=1.0)
    assert one.seconds(390, processor=1.0) == [Standing.MOVES]
    assert one.seconds(1000, processor=1.0) == [Standing.MOVES, Standing.BUSY]


def test_a_program_that_prints_nothing_at_all_is_not_judged_by_its_output():
    assert JudgedProgram().seconds(10_000, processor=1.0) == [Standing.MOVES]


def test_a_program_whose_main_thread_has_ended_stays_only_so_long():
    one = JudgedProgram()
    assert one.seconds(60, done=True) == [Standing.MOVES, Standing.DONE]
    assert not one.judge.stays
    one.seconds(10, done=True)
    assert one.judge.stays


def test_a_program_whose_main_thread_has_ended_is_not_ended_while_a_thread_wakes():
    one = JudgedProgram()
    assert one.seconds(10_000, done=True, wakes=True) == [Standing.MOVES, Standing.DONE]
    assert not one.judge.stays
    one.seconds(100, done=True)
    assert one.judge.stays


def test_work_is_read_from_the_kernel():
    source = "import time; sum(range(10**7)); open('/proc/self/stat').read(); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", source]) as child:
        try:
            until(lambda: processor_s(child.pid) > 0, 30, "work")
            work = Work.of([child.pid])
            assert work.processor_s > 0
            assert work.io_bytes > 100
            assert Work.of_main_thread().io_bytes > 0
        finally:
            child.kill()
    assert Work.of([child.pid]) == (0.0, 0)


# ------------------------------------------------------------------ what a worker declares


def test_declared_work_is_not_declared_while_its_own_thread_waits_for_others():
    assert waiting.declared_activity() == ""
    with waiting.declared("it evaluates after update %d", 3):
        assert waiting.declared_activity() == "it evaluates after update 3"
        with waiting.for_others("a gather"):
            assert waiting.declared_activity() == ""
        assert waiting.declared_activity() == "it evaluates after update 3"


def test_a_checkpoint_in_the_background_counts_while_the_main_thread_waits():
    begun, end = threading.Event(), threading.Event()

    def save():
        with waiting.declared("it saves"):
            begun.set()
            end.wait()

    thread = threading.Thread(target=save)
    thread.start()
    begun.wait()
    with waiting.for_others("a gather"):
        assert waiting.declared_activity() == "it saves"
    end.set()
    thread.join()


def test_a_deadline_counts_only_while_all_ranks_wait(monkeypatch):
    now = 100.0
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now)
    monkeypatch.setattr(waiting, "_is_judged", False)
    monkeypatch.setattr(waiting, "_standstill_since", None)
    deadline = waiting.PatientDeadline(10.0)
    now = 105.0
    assert (deadline.passed, deadline.over_s) == (False, -5.0)
    waiting.note_standstill(None)
    now = 1000.0
    assert not deadline.passed, "some rank works"
    waiting.note_standstill(4.0)
    assert (deadline.passed, deadline.over_s) == (False, -6.0)
    now = 1007.0
    assert deadline.passed
