"""When a failed run starts again, and what a stop does to a run."""

import pytest

from orchestrator.client.stop import Stop
from orchestrator.clusters.api import Culprit
from orchestrator.rundir.files import read_json, write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import Ruling, describe_stop, rule

KILLED = Culprit(rank=1, node="node0", cause="killed by signal 9 (SIGKILL)")


@pytest.fixture
def run(tmp_path):
    found = RunDir(tmp_path / "run")
    found.create()
    return found


def ruled(run, culprit, *, most=2, first=0):
    """The ruling on one more attempt."""
    return rule(run, run.begin_attempt(), culprit, first=first, most=most)


def test_without_an_allowance_nothing_starts_again_and_nothing_is_said(run):
    ruling = ruled(run, KILLED, most=0)
    assert ruling == Ruling(again=False)


def test_as_many_restarts_as_are_allowed(run):
    rulings = [ruled(run, KILLED) for _ in range(3)]
    assert [ruling.again for ruling in rulings] == [True, True, False]
    assert "attempt 2 begins" in rulings[1].words
    assert "restart 2 of 2" in rulings[1].words
    assert "run.max_restarts=2" in rulings[2].words
    assert "rank 1 on node0 failed first: killed" in read_json(run.departure(0))["why"]


def test_a_start_by_a_person_gives_a_new_allowance(run):
    assert [ruled(run, KILLED, most=1).again for _ in range(2)] == [True, False]
    assert ruled(run, KILLED, most=1, first=2).again


def test_a_wrong_request_is_not_started_again(run):
    wrong = Culprit(rank=0, node="node0", cause="no such file", usage=True)
    assert not ruled(run, wrong, most=9).again


def test_a_cancelled_run_stays_ended(run):
    run.cancel.touch()
    assert ruled(run, KILLED, most=9) == Ruling(again=False)


def test_departures_that_were_no_failures_use_nothing_up(run):
    for _ in range(3):
        left = run.begin_attempt()
        write_json(run.departure(left), {"why": "preempted", "updates": 3, "time": 1.0})
    ruling = ruled(run, KILLED, most=1)
    assert ruling.again
    assert "restart 1 of 1" in ruling.words
    assert "attempt 4 begins" in ruling.words
    said = ruled(run, KILLED, most=1).words
    assert said == "not started again: that was done 1 time already (run.max_restarts=1)"


@pytest.fixture
def program(run):
    write_json(run.plan, {"ranks": 2, "program": {"words": ["a.py"], "stop_signal": "INT"}})
    return run


def test_only_a_job_of_ours_is_said_to_have_a_boundary_and_a_checkpoint(program):
    assert "gets SIGINT" in describe_stop(program)
    write_json(program.plan, {"ranks": 2})
    assert describe_stop(program) == "stops at its next update boundary, with a checkpoint"


def test_a_program_stops_together_once_all_its_ranks_have_asked_in_this_attempt(program):
    for attempt in range(2):
        program.begin_attempt()
        for rank in range(2):
            assert "gets SIGINT" in describe_stop(program)
            Stop(program.attempt(attempt), rank, 2).due(0)
        assert "once all its ranks are done with the same update" in describe_stop(program)
