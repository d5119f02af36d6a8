"""Automatic restarts of failed runs."""

import time

import pytest

from orchestrator.clusters.api import Culprit
from orchestrator.rundir.files import read_json, write_json
from orchestrator.rundir.metrics import ProgressWriter
from orchestrator.rundir.restarts import (
    RestartDecision,
    RestartKind,
    grant_restart,
    record_restart,
)
from tests.run_folders import write_failure

KILLED = Culprit(rank=1, node="node0", cause="killed by signal 9 (SIGKILL)")
RAISED = Culprit(rank=1, node="node0", cause="ValueError: wrong")


def ruled(run, culprit, *, most=2, first=0, update=None):
    """The ruling on one more attempt, which failed in `update`."""
    attempt = run.begin_attempt()
    if update is not None:
        ProgressWriter(run.progress(attempt)).write(update, 0, 4)
    if culprit.cause != KILLED.cause:
        write_failure(run, 1, culprit.cause, attempt=attempt)
    decision = grant_restart(run, attempt, culprit, first=first, most=most)
    if decision.restarts:
        record_restart(run, attempt, decision.note, RestartKind.LAUNCHER)
    return decision


def test_no_restart_without_allowance_or_after_cancel(run):
    assert ruled(run, KILLED, most=0) == RestartDecision(restarts=False)
    run.cancel.touch()
    assert ruled(run, KILLED, most=9) == RestartDecision(restarts=False)


def test_as_many_restarts_as_are_allowed(run):
    decisions = [ruled(run, KILLED, update=5) for _ in range(3)]
    assert [decision.restarts for decision in decisions] == [True, True, False]
    assert "attempt 2 begins" in decisions[1].message
    assert "restart 2 of 2" in decisions[1].message
    assert "run.max_restarts=2" in decisions[2].message
    assert "rank 1 on node0 failed first: killed" in read_json(run.decision(0))["why"]


def test_a_start_by_a_person_gives_a_new_allowance(run):
    assert [ruled(run, KILLED, most=1).restarts for _ in range(2)] == [True, False]
    assert ruled(run, KILLED, most=1, first=2).restarts


ANOTHER = Culprit(rank=1, node="node0", cause="ValueError: something else")
MEMORY = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of "
    "79.10 GiB of which {} is free. Process {} has 41.20 GiB memory in use."
)
SMALL, LARGE = (
    Culprit(rank=1, node="node0", cause=MEMORY.format(*values))
    for values in (("20.00 MiB", "11.06 MiB", 2914), ("1.25 GiB", "987.31 MiB", 80211))
)
SHARDS = [Culprit(rank=1, node="node0", cause=f"OSError: no shard {n}") for n in (17, 23)]
PARTS = [
    Culprit(rank=1, node="node0", cause=f"HTTPError: 503 for https://data/{n}") for n in (17, 23)
]
WRONG = Culprit(rank=0, node="node0", cause="no such file", usage=True)


@pytest.mark.parametrize(
    ("failures", "again"),
    [
        ([(RAISED, 5), (RAISED, 5)], False),
        ([(RAISED, None), (RAISED, None)], False),
        ([(RAISED, 5), (RAISED, 6), (RAISED, 9)], True),
        ([(RAISED, 5), (ANOTHER, 5), (RAISED, 5)], True),
        ([(SMALL, None), (LARGE, None)], False),  # but for numbers that no start repeats
        ([(SMALL, 5), (LARGE, 6)], True),
        ([(SMALL, 5), (KILLED, 5)], True),  # a loss is never the same
        ([(KILLED, 5), (KILLED, 5)], True),
        ([(shard, None) for shard in SHARDS], True),  # from outside, of another file
        ([(part, None) for part in PARTS], True),
        ([(WRONG, None)], False),
    ],
)
def test_the_same_exception_without_progress_or_a_wrong_request_ends_it_early(run, failures, again):
    *before, last = [ruled(run, culprit, most=9, update=update) for culprit, update in failures]
    assert all(decision.restarts for decision in before)
    assert last.restarts is again
    assert again or not before or "attempt 0 raised the same" in last.message


def test_note_of_a_restart(run):
    before = time.time()
    assert ruled(run, RAISED, update=5).restarts
    note = read_json(run.decision(0))
    assert before <= note.pop("time") <= time.time()
    assert note == {
        "why": "rank 1 on node0 failed first: ValueError: wrong",
        "updates": None,
        "kind": "launcher",
        "failed": {"attempt": 0, "update": 5, "raised": "ValueError: wrong"},
    }
    assert ruled(run, KILLED).restarts
    killed = {"attempt": 1, "update": -1, "raised": None}
    assert read_json(run.decision(1))["failed"] == killed


def test_an_exception_that_only_followed_or_was_another_ranks_is_not_the_runs_own(run):
    for rank, secondary in ((1, True), (0, False)):
        attempt = run.attempts_made()
        run.attempt(attempt).mkdir()
        write_failure(run, rank, attempt=attempt, secondary=secondary)
        note = grant_restart(run, attempt, KILLED, first=0, most=9).note
        assert note["failed"]["raised"] is None


def test_departures_that_were_no_failures_use_nothing_up(run):
    for _ in range(3):
        left = run.begin_attempt()
        write_json(run.departure(left), {"why": "preempted", "updates": 3, "time": 1.0})
    decision = ruled(run, KILLED, most=1)
    assert decision.restarts
    assert "restart 1 of 1" in decision.message
    assert "attempt 4 begins" in decision.message
    said = ruled(run, KILLED, most=1).message
    assert said == "not started again: that was done 1 time already (run.max_restarts=1)"
