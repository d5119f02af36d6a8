"""Signs of life, the fence, leaving in time: each by itself, with a clock that the test holds."""

import signal

import pytest

from orchestrator.agent.topology import Topology
from orchestrator.engine.api import BoundaryReport, Window
from orchestrator.errors import StopRequested
from orchestrator.rundir.checkpoints import Fence, StaleAttempt, read_newest
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.trainer.attendance import Follower, GracePeriod
from orchestrator.trainer.loop import Done, Outcome
from orchestrator.trainer.stop import StopFlag, goes_on, restart_reason

DONE = Done(
    Window(update=7, samples=10, micro_batches=(), steps=1, learning_rate=0.1),
    BoundaryReport(update=7, loss=0, weight=1),
    seconds=9,
    epoch=0,
)


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "run")
    run.create()
    for attempt in range(3):
        run.attempt(attempt).mkdir()
    return run


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_only_the_newest_attempt_may_write(run):
    old, new = Fence(run.newest_attempt, 9), Fence(run.newest_attempt, 10)
    assert read_newest(run.newest_attempt) == -1
    old.take()
    old.check()
    new.take()
    assert read_newest(run.newest_attempt) == 10
    with pytest.raises(StaleAttempt, match="attempt 10 of this run has begun"):
        old.check()
    with pytest.raises(StaleAttempt):
        old.take()
    assert read_newest(run.newest_attempt) == 10
    new.check()


class Record:
    """Stands for rank 0's recorder."""

    def __init__(self, whole=True):
        self.saved, self.whole = [], whole

    save_s = 0.0

    def can_save(self):
        return self.whole

    def settle(self): ...

    def on_checkpoint(self, updates, samples):
        self.saved.append((updates, samples))


def guard_of(run, grace_s, clock, *, whole=True):
    record, stop = Record(whole), StopFlag()
    guard = GracePeriod(
        record, fence=Fence(run.newest_attempt, 0), stop=stop, hurry=lambda: grace_s,
        outcome=Outcome(updates=7, samples=70), clock=clock,
    )  # fmt: skip
    return guard, record, stop


def asked(stop, at):
    stop.signal, stop.time = signal.SIGUSR2, at


def test_a_boundary_in_time_is_waited_for(run):
    clock = Clock()
    guard, record, stop = guard_of(run, 30.0, clock)
    guard.on_micro_step(7, 0, 4)
    asked(stop, clock.now)
    for done in (1, 2, 3, 4):
        clock.now += 5
        guard.on_micro_step(7, done, 4)
    assert record.saved == []


def test_a_boundary_that_would_come_too_late_is_not(run):
    clock = Clock()
    guard, record, stop = guard_of(run, 10.0, clock)
    guard.on_micro_step(7, 0, 4)
    asked(stop, clock.now)
    clock.now += 5
    with pytest.raises(StopRequested, match="after the grace of 10 s"):
        guard.on_micro_step(7, 1, 4)
    assert record.saved == [(7, 70)]


def test_a_sharded_state_cannot_be_saved_in_mid_window_and_that_is_said(run):
    clock = Clock()
    guard, record, stop = guard_of(run, 10.0, clock, whole=False)
    guard.on_micro_step(7, 0, 4)
    asked(stop, clock.now)
    clock.now += 5
    with pytest.raises(StopRequested, match="newest checkpoint is lost, since the optimizer is sh"):
        guard.on_micro_step(7, 1, 4)
    assert record.saved == []


def test_without_haste_a_stop_always_waits_for_the_boundary(run):
    clock = Clock()
    guard, record, stop = guard_of(run, None, clock)
    asked(stop, clock.now)
    for done in range(5):
        clock.now += 1000
        guard.on_micro_step(7, done, 4)
    assert record.saved == []


def test_updates_longer_than_the_grace_are_told_once(run):
    guard, _, _ = guard_of(run, 2.0, Clock())
    with pytest.warns(UserWarning, match="longer than the 2 s"):
        guard.on_boundary(DONE)
    guard.on_boundary(DONE)  # a second warning would be an error


def test_a_superseded_attempt_writes_nothing_more(run):
    guard, _, _ = guard_of(run, None, Clock())
    Fence(run.newest_attempt, 1).take()
    with pytest.raises(StaleAttempt):
        guard.before_record()
    clock = Clock()
    guard, record, stop = guard_of(run, 10.0, clock)
    guard.on_micro_step(7, 0, 4)
    asked(stop, clock.now)
    clock.now += 5
    with pytest.raises(StaleAttempt):
        guard.on_micro_step(7, 1, 4)
    assert record.saved == []


def test_the_others_leave_a_window_when_rank_0_has(run):
    stop = StopFlag()
    follower = Follower(stop, run.departure(0))
    write_json(run.departure(0), {"why": "preempted"})
    follower.on_micro_step(0, 1, 4)  # nobody asked this rank to stop
    asked(stop, 1.0)
    with pytest.raises(StopRequested):
        follower.on_micro_step(0, 2, 4)


def topology(base):
    return Topology(
        rank=0, size=2, local_rank=0, node_index=0, nodes=2, node="n0", address="127.0.0.1",
        job_id="1", restarts=2, base_attempt=base,
    )  # fmt: skip


def test_attempts_count_on_over_requeues_and_resubmissions():
    assert topology(0).attempt == 2
    assert topology(5).attempt == 7
    assert not topology(None).scheduled


def test_a_stop_ends_the_run_only_if_it_was_cancelled_or_may_not_be_requeued(run):
    assert goes_on(run, topology(0), requeue=True)
    assert not goes_on(run, topology(0), requeue=False)
    assert not goes_on(run, topology(None), requeue=True)
    write_json(run.cancel, {})
    assert not goes_on(run, topology(0), requeue=True)


def test_the_reason_of_a_restart_is_the_node_that_failed_or_what_was_left_behind(run):
    assert restart_reason(run, 0) is None
    assert restart_reason(run, 1) is None
    write_json(run.departure(0), {"why": "preempted"})
    assert restart_reason(run, 1) == "preempted"
    run.srun_log(1).write_text("srun: error: Node failure on n3\nsrun: Job step aborted\n")
    assert restart_reason(run, 2) == "node n3 failed"
