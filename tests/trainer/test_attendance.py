"""Signs of life, the fence, leaving in time: each by itself, with a clock that the test holds."""

import os
import signal
import subprocess
import sys
import threading
from functools import partial

import pytest

from orchestrator.engine.api import BoundaryReport, Window
from orchestrator.errors import StopRequested
from orchestrator.lifecycle.signs.heartbeat import Heartbeat, Silence, read_waits
from orchestrator.lifecycle.stopping.departure import (
    await_verdict,
    goes_on,
    step_gone,
    why_restarted,
)
from orchestrator.lifecycle.stopping.stop_signals import StopFlag
from orchestrator.lifecycle.topology import Topology
from orchestrator.rundir.checkpoints import Fence, StaleAttempt, read_newest
from orchestrator.rundir.files import read_json, write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.status import BEAT_ENDED, read_beat
from orchestrator.trainer.attendance import Follower, Guard
from orchestrator.trainer.loop import Outcome
from tests.helpers import ROOT, until


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


def test_silence_is_measured_by_the_watchers_own_clock_alone():
    clock = Clock()
    silence = Silence(timeout_s=5, clock=clock)
    assert not silence.exceeded("")  # it has not begun
    for beat in range(20):
        clock.now += 1
        assert not silence.exceeded(str(beat))
    for _ in range(5):
        clock.now += 1
        assert not silence.exceeded("19")
    clock.now += 1
    assert silence.exceeded("19")


def test_a_watcher_that_stood_still_itself_accuses_nobody():
    clock = Clock()
    silence = Silence(timeout_s=5, clock=clock)
    silence.exceeded("1")
    clock.now += 600  # a file system that hung, or a machine that slept
    assert not silence.exceeded("1")


def test_a_node_that_ended_in_order_is_never_silent():
    clock = Clock()
    silence = Silence(timeout_s=5, clock=clock)
    for _ in range(100):
        clock.now += 1
        assert not silence.exceeded(BEAT_ENDED)


def test_each_node_watches_the_next_one_and_finds_it_silent(run):
    silent = threading.Event()
    found = []

    def hear(node):
        found.append(node)
        silent.set()

    common = {"nodes": 2, "superseded": lambda: False}
    path_of = partial(run.heartbeat, 0)
    other = Heartbeat(path_of, node_index=1, timeout_s=99, on_silence=print, **common)
    one = Heartbeat(path_of, node_index=0, timeout_s=0.5, on_silence=hear, **common)
    other.start()
    one.start()
    until(lambda: read_beat(run.heartbeat(0, 0)) == "1", 5)
    assert not found
    other._over.set()  # its machine dies: no word of farewell
    assert silent.wait(10)
    assert found == [1]
    one.end()
    assert read_beat(run.heartbeat(0, 0)) == BEAT_ENDED


def test_behind_a_beat_stands_what_the_nodes_first_rank_waits_for(run):
    path_of, waits = partial(run.heartbeat, 0), "9 s at the boundary of update 3, for bücket 1"
    beats = Heartbeat(
        path_of, node_index=0, nodes=1, timeout_s=9, on_silence=print,
        superseded=lambda: False, waits=lambda: waits * 20,
    )  # fmt: skip
    beats.start().end()
    assert read_beat(path_of(0)) == BEAT_ENDED
    assert read_waits(path_of(0)).startswith(waits.replace("ü", "?"))
    assert path_of(0).stat().st_size == 512


FORGETFUL = """#!/bin/sh
echo "$@" >> "$0.asked"
[ "$(wc -l < "$0.asked")" -gt 3 ] && exit 0
echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2
exit 1
"""
RANK = """
import os, sys, time
from pathlib import Path
from orchestrator.config.schema import Config
from orchestrator.rundir.folder import RunDir
from orchestrator.trainer.attendance import Attendance
from orchestrator.lifecycle.stopping.stop_signals import StopFlag
from orchestrator.lifecycle.topology import Topology

run = RunDir(Path(sys.argv[1]))
place = Topology(rank=0, size=2, local_rank=0, node_index=0, nodes=2, node="n0",
                 address="127.0.0.1", job_id="1", restarts=2, base_attempt=0)
attendance = Attendance(run, 2, place, StopFlag())
settings = Config()
settings.cluster.heartbeat_timeout_s = 0.5
attendance.begin(settings)
while not run.departure(2).exists():
    time.sleep(0.05)
attendance.end("failed")
os._exit(7)
"""


def test_a_rank_ends_only_when_the_scheduler_has_heard_that_it_shall_start_again(run, tmp_path):
    """The commands fail at first, for longer than anything else is waited for at the end."""
    commands = tmp_path / "bin"
    commands.mkdir()
    scontrol = commands / "scontrol"
    scontrol.write_text(FORGETFUL)
    scontrol.chmod(0o700)
    run.heartbeat(2, 1).write_text("7           ")  # and not a beat more
    rank = subprocess.run(
        [sys.executable, "-c", RANK, run.path], check=False, timeout=60,
        env={
            **os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{commands}:{os.environ['PATH']}",
            "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_ID": "1",
        },
    )  # fmt: skip
    assert rank.returncode == 7
    assert (commands / "scontrol.asked").read_text().splitlines() == ["requeue 1"] * 4
    departure = read_json(run.departure(2), checked=True)  # as all that the next start reads
    assert departure["why"] == "node n1 stopped answering"


class Record:
    """Stands for rank 0's recorder."""

    def __init__(self, whole=True):
        self.saved, self.whole = [], whole

    def micro_step(self, update, done, steps): ...
    def boundary(self, window, report, *, epoch, update_s): ...
    def evaluation(self, update, epoch, figures): ...

    save_s = 0.0

    def can_save(self):
        return self.whole

    def settle(self): ...

    def checkpoint(self, updates, samples):
        self.saved.append((updates, samples))


def guard_of(run, grace_s, clock, *, whole=True):
    record, stop = Record(whole), StopFlag()
    guard = Guard(
        record, fence=Fence(run.newest_attempt, 0), stop=stop, hurry=lambda: grace_s,
        outcome=Outcome(updates=7, samples=70), clock=clock,
    )  # fmt: skip
    return guard, record, stop


def asked(stop, at):
    stop.signal, stop.time = signal.SIGUSR2, at


def test_a_boundary_in_time_is_waited_for(run):
    clock = Clock()
    guard, record, stop = guard_of(run, 30.0, clock)
    guard.micro_step(7, 0, 4)
    asked(stop, clock.now)
    for done in (1, 2, 3, 4):
        clock.now += 5
        guard.micro_step(7, done, 4)
    assert record.saved == []


def test_a_boundary_that_would_come_too_late_is_not(run):
    clock = Clock()
    guard, record, stop = guard_of(run, 10.0, clock)
    guard.micro_step(7, 0, 4)
    asked(stop, clock.now)
    clock.now += 5
    with pytest.raises(StopRequested, match="after the grace of 10 s"):
        guard.micro_step(7, 1, 4)
    assert record.saved == [(7, 70)]


def test_a_sharded_state_cannot_be_saved_in_mid_window_and_that_is_said(run):
    clock = Clock()
    guard, record, stop = guard_of(run, 10.0, clock, whole=False)
    guard.micro_step(7, 0, 4)
    asked(stop, clock.now)
    clock.now += 5
    with pytest.raises(StopRequested, match="newest checkpoint is lost, since the optimizer is sh"):
        guard.micro_step(7, 1, 4)
    assert record.saved == []


def test_without_haste_a_stop_always_waits_for_the_boundary(run):
    clock = Clock()
    guard, record, stop = guard_of(run, None, clock)
    asked(stop, clock.now)
    for done in range(5):
        clock.now += 1000
        guard.micro_step(7, done, 4)
    assert record.saved == []


def test_updates_longer_than_the_grace_are_told_once(run):
    guard, _, _ = guard_of(run, 2.0, Clock())
    window = Window(update=7, samples=10, micro_batches=(), steps=1, learning_rate=0.1)
    report = BoundaryReport(update=7, loss=0, weight=1)
    with pytest.warns(UserWarning, match="longer than the 2 s"):
        guard.boundary(window, report, epoch=0, update_s=9)
    guard.boundary(window, report, epoch=0, update_s=9)  # a second warning would be an error


def test_a_superseded_attempt_writes_nothing_more(run):
    guard, record, _ = guard_of(run, None, Clock())
    Fence(run.newest_attempt, 1).take()
    window = Window(update=7, samples=10, micro_batches=(), steps=1, learning_rate=0.1)
    with pytest.raises(StaleAttempt):
        guard.boundary(window, BoundaryReport(update=7, loss=0, weight=1), epoch=0, update_s=1)
    with pytest.raises(StaleAttempt):
        guard.checkpoint(8, 80)
    assert record.saved == []


def test_the_others_leave_a_window_when_rank_0_has(run):
    stop = StopFlag()
    follower = Follower(stop, run.departure(0))
    write_json(run.departure(0), {"why": "preempted"})
    follower.micro_step(0, 1, 4)  # nobody asked this rank to stop
    asked(stop, 1.0)
    with pytest.raises(StopRequested):
        follower.micro_step(0, 2, 4)


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


def test_a_lost_peer_is_excused_when_the_attempt_is_leaving(run):
    stop = StopFlag()
    write_json(run.departure(0), {"why": "preempted"})
    assert await_verdict(run, 0, stop, 1)
    timer = threading.Timer(0.2, lambda: setattr(stop, "received", 1))
    timer.start()
    assert not await_verdict(run, 1, stop, 60)  # srun ends us: a rank has failed


@pytest.mark.parametrize(
    "words",
    [
        "Aborting, io error and missing step on node 1",
        "Aborting, step missing and io error on node 1",
        "step_launch_notify_io_failure: aborting, io error with slurmstepd on node 1",
        "Aborting, can not test connection to node 1.",
        "Cannot communicate with node 1.  Aborting job.",
    ],
)
def test_srun_is_understood_when_it_misses_a_nodes_processes(run, words, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[3,5]")
    run.srun_log(0).write_text(f"srun: error: _server_write write failed\nsrun: error: {words}\n")
    departure = step_gone(run, 0)
    assert departure is not None
    assert (departure["node"], departure["why"]) == ("n5", "node n5 stopped answering")
    run.srun_log(0).write_text("srun: error: n0: task 1: Exited with exit code 1\n")
    assert step_gone(run, 0) is None
    assert step_gone(run, 1) is None


def test_the_reason_of_a_restart_is_the_node_that_failed_or_what_was_left_behind(run):
    assert why_restarted(run, 0) is None
    assert why_restarted(run, 1) is None
    write_json(run.departure(0), {"why": "preempted"})
    assert why_restarted(run, 1) == "preempted"
    run.srun_log(1).write_text("srun: error: Node failure on n3\nsrun: Job step aborted\n")
    assert why_restarted(run, 2) == "node n3 failed"
