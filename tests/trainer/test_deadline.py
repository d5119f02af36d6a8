"""How long a stop may take: by the scheduler's word, else by the shortest that its kind allows."""

import signal
import threading

import pytest

from orchestrator.errors import StopRequested
from orchestrator.rundir.checkpoints import Fence
from orchestrator.rundir.files import read_json, write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.slurm_client import JobStatus
from orchestrator.trainer import stop as deadline
from orchestrator.trainer.attendance import GracePeriod
from orchestrator.trainer.loop import Outcome
from orchestrator.trainer.stop import Deadline, Notice, StopFlag, depart, killed_at

TERM, USR2 = signal.SIGTERM, signal.SIGUSR2
NOTICE = Notice(kill_wait_s=30, preempt_s=20, ahead_s=60)
EPOCH, CLOCK = 1_700_000_000.0, 1000.0  # now, by both clocks


def told(**seconds_ago):
    stop = StopFlag()
    for name, ago in seconds_ago.items():
        number = getattr(signal, f"SIG{name}")
        stop.signal, stop.times[number] = number, CLOCK - ago
        stop.received += 1
    stop.time = min(stop.times.values(), default=0.0)
    return stop


def running(**more):
    return JobStatus(state="RUNNING", **more)


@pytest.mark.parametrize(
    ("signals", "job", "left_s"),
    [
        # requeued by hand, a node set down, cancelled, the time limit reached: KillWait, not 60 s
        ({"TERM": 0}, JobStatus(state="COMPLETING", restarts=1), 30),
        ({"TERM": 2}, JobStatus(state="COMPLETING", reason="NodeDown"), 28),
        ({"USR2": 50, "TERM": 1}, JobStatus(state="COMPLETING", reason="TimeLimit"), 29),
        # preempted: the grace that this job really has, of its partition or QOS, then KillWait
        ({"USR2": 0}, running(preempted_at=EPOCH, ends_at=EPOCH + 120), 150),
        ({"TERM": 1}, running(preempted_at=EPOCH, ends_at=EPOCH + 20), 49),
        ({"USR2": 0}, running(preempted_at=EPOCH), 50),  # no time limit: the partition's
        ({"USR2": 0}, running(preempted_at=EPOCH, ends_at=EPOCH), 30),  # GraceTime=0 is not nothing
        # notice of a time limit, however early it comes
        ({"USR2": 0}, running(ends_at=EPOCH + 100), 130),
        ({"USR2": 0}, running(ends_at=EPOCH + 5), 35),
        # scancel --full -s TERM, an srun that gives up: the job runs on, its ranks are killed
        ({"TERM": 0}, running(ends_at=EPOCH + 9999), 30),
        ({"USR2": 1, "TERM": 0}, running(ends_at=EPOCH + 9999), 30),
        # a signal by hand
        ({"USR2": 0}, running(), None),
        # the scheduler cannot be asked: the shortest that it can be
        ({"TERM": 0}, None, 30),
        ({"USR2": 0}, None, 50),
    ],
)
def test_the_right_grace_is_chosen_for_each_cause(signals, job, left_s):
    end = killed_at(told(**signals), job, NOTICE, EPOCH, CLOCK)
    assert left_s == (None if end is None else end - CLOCK)


def test_the_scheduler_is_asked_once_a_signal_and_again_when_another_comes():
    answers = [running(), JobStatus(state="COMPLETING")]
    stop = told(USR2=0)
    asked = Deadline(stop, NOTICE, lambda: answers.pop(0))
    assert asked.grace_s() is None
    assert asked.grace_s() is None
    stop.times[TERM], stop.received = stop.time + 5, 2
    assert asked.grace_s() == 35
    assert not answers


def test_a_scheduler_that_does_not_answer_is_not_waited_for(monkeypatch, capfd):
    monkeypatch.setattr(deadline, "ASK_S", 0.05)
    silent = threading.Event()
    assert Deadline(told(TERM=0), NOTICE, silent.wait).grace_s() == 30
    silent.set()

    def none():
        raise OSError("no squeue here")

    assert Deadline(told(USR2=0), NOTICE, none).grace_s() == pytest.approx(50)
    assert "no squeue here" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (running(preempted_at=EPOCH), "preempted"),
        (JobStatus(state="COMPLETING", restarts=3), "requeued (scontrol requeue, or a node"),
        (running(restarts=2, ends_at=float("inf")), "asked to stop by SIGUSR2"),
        (None, "asked to stop by SIGUSR2"),
    ],
)
def test_a_stop_is_for_the_schedulers_reason_where_it_gives_one(job, why):
    """Of the third start of a job."""
    assert Deadline(told(USR2=0), NOTICE, lambda: job).why(2).startswith(why)


def test_before_any_signal_the_shortest_notice_is_told():
    assert Deadline(StopFlag(), NOTICE, lambda: None).grace_s() == 50
    assert Notice(kill_wait_s=3, ahead_s=10).shortest_s == 10
    assert Notice.read({"kill_wait_s": 3, "preempt_grace_s": 0}, 60).shortest_s == 3
    assert Notice.read({}, 60) == Notice(ahead_s=60), "where the scheduler was not asked"


class Record:
    """Rank 0's recorder, as far as `GracePeriod` needs one."""

    def __init__(self, *, whole):
        self.whole, self.saved = whole, []

    save_s = 0.0

    def can_save(self):
        return self.whole

    def on_checkpoint(self, updates, samples):
        self.saved.append(updates)


def guard_of(run, stop, clock, *, whole=True, **more):
    return GracePeriod(
        Record(whole=whole), fence=Fence(run.newest_attempt, 0), stop=stop,
        outcome=Outcome(updates=7, samples=70), clock=clock, **more,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "run")
    run.create()
    run.attempt(0).mkdir()
    return run


def test_cancel_is_read_at_a_boundary_although_no_signal_came(run):
    stop = StopFlag()
    guard = guard_of(run, stop, lambda: 1000.0, hurry=lambda: None, cancelled=run.cancel.exists)
    guard.on_micro_step(7, 4, 4)
    assert not stop.requested
    write_json(run.cancel, {"how": "stop"})
    for clock in (1000.5, 1002.0):  # once a second at the most
        guard._clock = lambda clock=clock: clock
        guard.on_micro_step(8, 2, 4)
        guard.on_micro_step(8, 4, 4)
        assert stop.requested == (clock > 1001)


def test_a_boundary_is_hoped_for_to_the_last_where_leaving_would_save_nothing(run):
    now = [1000.0]
    stop = told(TERM=0)
    guard = guard_of(run, stop, lambda: now[0], whole=False, hurry=lambda: 10.0)
    guard.on_micro_step(7, 0, 8)
    for done in (1, 2, 3):
        now[0] += 2.0
        guard.on_micro_step(7, done, 8)  # by their pace the boundary comes after 16 s
    now[0] += 2.0
    with pytest.raises(StopRequested):  # one more would end after the kill
        guard.on_micro_step(7, 4, 8)


def test_the_reason_of_a_silent_node_outlives_the_signal_that_follows(run):
    silent = {"why": "node n1 stopped answering", "node": "n1", "updates": None, "time": 1.0}
    write_json(run.departure(0), silent)
    depart(run, 0, "asked to stop by SIGTERM", 5)
    found = read_json(run.departure(0))
    assert (found["why"], found["node"], found["updates"]) == (silent["why"], "n1", 5)
