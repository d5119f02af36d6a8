"""Stops: their deadline, leaving a window in time, departures, with a clock that the test sets."""

import errno
import json
import os
import signal
import time
from types import SimpleNamespace

import pytest

from orchestrator.client.loop import CompletedUpdate, TrainingProgress
from orchestrator.engine.api import BoundaryReport, Window
from orchestrator.engine.common import waiting
from orchestrator.errors import StopRequested
from orchestrator.rundir.checkpoints import Fence, StaleAttempt
from orchestrator.rundir.files import read_json, write_json
from orchestrator.rundir.metrics import ProgressWriter
from orchestrator.rundir.outcome import note_departure
from orchestrator.trainer.stop import (
    Follower,
    GracePeriods,
    LeaveInTime,
    StopFlag,
    lost_progress,
    restart_reason,
)
from orchestrator.trainer.worker import WorkerProcess

pytestmark = pytest.mark.whole_runs

TERM, USR2 = signal.SIGTERM, signal.SIGUSR2
GRACE = GracePeriods(kill_wait_s=30, preempt_s=20, ahead_s=60)

DONE = CompletedUpdate(
    Window(update=7, samples=10, micro_batches=(), steps=1, learning_rate=0.1),
    BoundaryReport(update=7, loss=0, weight=1),
    seconds=9,
)


@pytest.fixture
def run(run):
    for attempt in range(3):
        run.attempt(attempt).mkdir()
    return run


class Rank0:
    """A loop's callback on rank 0, with a clock that the test sets."""

    def __init__(self, run, grace_s, *, whole=True):
        self.now, self.saved, self.stop = 1000.0, [], StopFlag()
        record = SimpleNamespace(
            save_s=0.0,
            can_save=lambda: whole,
            save_now=lambda progress: self.saved.append((progress.updates, progress.samples)),
        )
        self.callback = LeaveInTime(
            record,
            fence=Fence(run.newest_attempt, 0),
            stop=self.stop,
            grace=None if grace_s is None else GracePeriods(ahead_s=grace_s),
            cancelled=run.cancel.exists,
            progress=TrainingProgress(updates=7, samples=70),
            clock=lambda: self.now,
        )

    def ask(self):
        self.stop.signal = USR2
        self.stop.times.setdefault(USR2, self.now)

    def steps(self, seconds, numbers, steps):
        for done in numbers:
            self.callback.on_micro_step(7, done, steps)
            self.now += seconds


@pytest.mark.parametrize(
    ("grace_s", "pace_s", "cancelled"),
    [(30.0, 5, False), (None, 1000, False), (10.0, 1000, True)],
    ids=["it comes in time", "the run does not restart", "the run is cancelled"],
)
def test_a_boundary_is_waited_for(run, grace_s, pace_s, cancelled):
    if cancelled:
        write_json(run.cancel, {"how": "stop"})
    rank = Rank0(run, grace_s)
    rank.ask()
    rank.steps(pace_s, range(5), 4)
    assert rank.saved == []


@pytest.mark.parametrize(("whole", "why"), [(True, "after the grace of 10 s"), (False, "is lost")])
def test_a_window_whose_boundary_would_come_too_late_is_left(run, whole, why):
    """A sharded state cannot be saved in mid-window, and the message says so."""
    rank = Rank0(run, 10.0, whole=whole)
    rank.ask()
    with pytest.raises(StopRequested, match=why):
        rank.steps(5, range(5), 4)
    assert rank.saved == [(7, 70)] * whole


def test_a_boundary_is_waited_for_to_the_last_if_leaving_would_save_nothing(run):
    rank = Rank0(run, 10.0, whole=False)
    rank.ask()
    rank.steps(2, range(4), 8)  # by their pace the boundary comes after 16 s
    with pytest.raises(StopRequested):  # one more would end after the kill
        rank.steps(2, [4], 8)


def test_a_request_to_cancel_is_read_at_boundaries_once_a_second(run):
    rank = Rank0(run, 10.0)
    rank.callback.on_micro_step(7, 4, 4)
    assert not rank.stop.requested
    write_json(run.cancel, {"how": "stop"})
    for now in (1000.5, 1002.0):
        rank.now = now
        rank.steps(0, [2, 4], 4)
        assert rank.stop.requested == (now > 1001)


def deferring(run, **periods):
    """Rank 0 of a run whose notice of a time limit is long: an end takes 20 s."""
    rank = Rank0(run, None)
    rank.callback._grace = GracePeriods(ahead_s=60, end_s=20, **periods)
    rank.callback._progress.done = DONE
    rank.stop.defers = True
    return rank


@pytest.mark.parametrize(
    ("periods", "updates"),
    [
        ({}, 6),  # of 5 s each, and a checkpoint of 0.75 s, in 60 s less the end's 20
        ({"job_ends": 1100.0}, 14),  # 80 s
        ({"job_ends": 1100.0, "preempt_s": 30.0, "kill_wait_s": 30.0}, 6),  # it may be that
        ({"job_ends": 900.0}, 6),  # the limit was extended
    ],
)
def test_a_long_notice_of_the_time_limit_is_deferred_until_the_end_is_near(run, periods, updates):
    rank = deferring(run, **periods)
    rank.ask()
    done = 0
    while not rank.stop.requested:
        rank.steps(1.25, range(4), 4)
        rank.steps(0, [4], 4)
        done += 1
    assert (done, rank.saved) == (updates + 1, [])


def test_other_requests_are_not_deferred(run):
    for request in (TERM, None):
        stop = deferring(run).stop
        stop.set(USR2)
        stop.set(USR2)  # the agent's parent forwards it, too
        assert not stop.requested
        stop.set(request)
        assert stop.requested
    stop.times = {USR2: stop.times[USR2] - 6}
    stop.set(USR2)
    assert stop.requested, "a person repeated it"


def test_updates_longer_than_the_grace_are_warned_of_once(run):
    callback = Rank0(run, 2.0).callback
    with pytest.warns(UserWarning, match="longer than the 2 s"):
        callback.on_boundary(DONE)
    callback.on_boundary(DONE)  # a second warning would be an error


def test_a_superseded_attempt_writes_nothing_more(run):
    rank = Rank0(run, 10.0)
    Fence(run.newest_attempt, 1).publish()
    with pytest.raises(StaleAttempt):
        rank.callback.before_record()
    rank.ask()
    with pytest.raises(StaleAttempt):
        rank.steps(5, range(4), 4)
    assert rank.saved == []


def test_the_others_leave_a_window_when_rank_0_has(run):
    stop = StopFlag()
    follower = Follower(stop, run.departure(0))
    write_json(run.departure(0), {"why": "preempted"})
    follower.on_micro_step(0, 1, 4)  # this rank has no request yet
    stop.set(USR2)
    with pytest.raises(StopRequested):
        follower.on_micro_step(0, 2, 4)


@pytest.mark.parametrize(
    ("signals_ago", "left_s"),
    [
        ({USR2: 0}, 50),  # the shorter of a time limit's notice and preemption's grace
        ({USR2: 12}, 38),
        ({TERM: 0}, 30),
        ({USR2: 45, TERM: 1}, 5),
        ({USR2: 1, TERM: 0}, 30),
    ],
)
def test_the_kill_is_expected_at_the_earliest_possible_time(signals_ago, left_s):
    stop = StopFlag()
    stop.times = {number: 1000.0 - ago for number, ago in signals_ago.items()}
    assert GRACE.deadline(stop) == 1000.0 + left_s


def test_the_grace_periods_are_read_from_the_submission():
    assert GracePeriods(kill_wait_s=3, ahead_s=10).shortest_s == 10
    assert GracePeriods.read({"kill_wait_s": 3, "preempt_grace_s": 0}, 60).shortest_s == 3
    assert GracePeriods.read({"time_limit_s": 60}, 60).ahead_s == 30
    assert GracePeriods.read({}, 60) == GracePeriods(ahead_s=60), "no scheduler was asked"
    assert GracePeriods.read({"time_limit_s": 600}, 299, 5.0).end_s is None
    long = GracePeriods.read({"time_limit_s": 600}, 300, 5.0)
    assert (long.ahead_s, long.end_s, long.job_ends) == (300, 60, 605.0)


def test_an_earlier_reason_for_a_departure_stays(run):
    lost = {"why": "node n1 went away", "updates": None, "time": 1.0}
    write_json(run.departure(0), lost)
    note_departure(run, 0, "asked to stop by SIGTERM", 5)
    found = read_json(run.departure(0))
    assert (found["why"], found["updates"]) == ("node n1 went away", 5)


def test_a_departure_is_noted_once_there_is_space_on_the_disk(run, monkeypatch):
    full, activities = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) for _ in range(3)], []

    def write(path, table):
        activities.append(waiting.declared_activity())
        if full:
            raise full.pop()
        write_json(path, table)

    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr("orchestrator.rundir.outcome.write_json", write)
    stop = StopFlag()
    stop.set(TERM)
    worker = SimpleNamespace(
        run=run, attempt=2, stop=stop, restarts=True, fence=Fence(run.newest_attempt, 2)
    )
    with pytest.warns(UserWarning, match="waiting for space on the disk"):
        assert WorkerProcess.depart(worker, 5)
    assert read_json(run.departure(2))["updates"] == 5
    assert set(activities) == {"it waits for space on the disk"}, "it is not taken to hang"


def test_the_reason_of_a_restart_is_the_node_that_failed_or_what_was_left_behind(run):
    assert restart_reason(run, 0) is None
    assert restart_reason(run, 1) is None
    write_json(run.departure(0), {"why": "preempted"})
    assert restart_reason(run, 1) == "preempted"
    run.srun_log(1).write_text("srun: error: Node failure on n3\nsrun: Job step aborted\n")
    assert restart_reason(run, 2) == "node n3 failed"
    hung = {"rank": 1, "node": "n2", "cause": "it hangs: it has been at …", "log_tail": []}
    outcome = {"state": "failed", "culprit": hung, "lost": None}
    write_json(run.outcome(1), outcome)  # the loss of n3 was survived
    assert restart_reason(run, 2) == "rank 1 on n2 failed first: it hangs: it has been at …"
    lost_a_peer = {"rank": 1, "node": "n2", "secondary": True}
    write_json(run.failure(1, 1), lost_a_peer)
    assert restart_reason(run, 2) == "node n3 failed"


@pytest.mark.parametrize(
    ("note", "why"),
    [
        ("JOB REQUEUE", "requeued (scontrol requeue, or a node that failed or was set down)"),
        ("NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", "a node failed"),
        ("PREEMPTION", "preempted"),
    ],
)
def test_a_job_that_slurm_ended_before_its_ranks_could_answer_has_slurms_reason(run, note, why):
    def cancelled(at: float) -> str:
        text = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at))
        return f"slurmstepd-n0: error: *** JOB 7 ON n0 CANCELLED AT {text} DUE TO {note} ***\n"

    run.srun_log(1).write_text("srun: Job step aborted: Waiting up to 5 seconds\n")
    run.batch_log.write_text(cancelled(time.time() - 60))
    assert restart_reason(run, 2) is None, "that was an earlier attempt"
    with run.batch_log.open("a") as log:
        log.write(cancelled(time.time()))
    assert restart_reason(run, 2) == f"{why}; its ranks had too little time to stop"


def test_lost_updates_are_counted_whoever_wrote_the_record_last(run):
    ProgressWriter(run.progress(0)).write(89, 4, 4)
    run.metrics.write_text(json.dumps({"update": 89, "loss": 0.5, "attempt": 0}) + "\n")
    ProgressWriter(run.progress(0))  # of a rank that takes over, and is lost as well
    assert lost_progress(run, 1, 60) == (30, 0)
    assert lost_progress(run, 1, 90) == (0, 0)
    # Attempt 1 has ended before it began to train, or to note what was lost.
    assert lost_progress(run, 2, 60) == (30, 0)
    write_json(run.restart(1), {"lost_updates": 30})
    assert lost_progress(run, 2, 60) == (0, 0)
    ProgressWriter(run.progress(1)).write(62, 3, 4)
    assert lost_progress(run, 2, 60) == (2, 3)
