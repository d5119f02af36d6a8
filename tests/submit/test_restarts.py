"""When a failed run starts again by itself: a rule on what its folder says."""

import pytest

from orchestrator.rundir import RunDir, read_json, write_json
from orchestrator.submit.api import Culprit
from orchestrator.submit.restarts import rule
from orchestrator.worker.progress import ProgressWriter

KILLED = Culprit(rank=1, node="node0", cause="killed by signal 9 (SIGKILL)")
RAISED = Culprit(rank=1, node="node0", cause="ValueError: wrong")


@pytest.fixture
def run(tmp_path):
    found = RunDir(tmp_path / "run")
    found.create()
    return found


def ruled(run, culprit, *, most=2, first=0, update=None):
    """The ruling on one more attempt, which failed in `update`."""
    attempt = run.begin_attempt()
    if update is not None:
        ProgressWriter(run.progress(attempt)).write(update, 0, 4)
    if culprit is RAISED:
        failure = {"rank": 1, "cause": RAISED.cause, "secondary": False}
        write_json(run.failure(attempt, 1), failure)
    return rule(run, attempt, culprit, first=first, most=most)


def test_without_an_allowance_nothing_starts_again_and_nothing_is_said(run):
    ruling = ruled(run, KILLED, most=0)
    assert (ruling.again, ruling.words) == (False, "")


def test_as_many_restarts_as_are_allowed(run):
    rulings = [ruled(run, KILLED, update=5) for _ in range(3)]
    assert [ruling.again for ruling in rulings] == [True, True, False]
    assert "attempt 2 begins" in rulings[1].words
    assert "restart 2 of 2" in rulings[1].words
    assert "run.max_restarts=2" in rulings[2].words
    assert "rank 1 on node0 failed first: killed" in read_json(run.departure(0))["why"]


def test_a_start_by_a_person_gives_a_new_allowance(run):
    assert [ruled(run, KILLED, most=1).again for _ in range(2)] == [True, False]
    assert ruled(run, KILLED, most=1, first=2).again


def test_the_same_exception_without_progress_ends_it_early(run):
    assert ruled(run, RAISED, most=9, update=5).again
    ruling = ruled(run, RAISED, most=9, update=5)
    assert not ruling.again
    assert "attempt 0 raised the same in update 5" in ruling.words


def test_the_same_exception_before_any_update_ends_it_early(run):
    assert ruled(run, RAISED, most=9).again
    assert "before the first update" in ruled(run, RAISED, most=9).words


def test_the_same_exception_after_progress_does_not(run):
    assert all(ruled(run, RAISED, most=9, update=update).again for update in (5, 6, 9))


def test_other_failures_at_the_same_place_do_not(run):
    assert all(ruled(run, one, most=9, update=5).again for one in (KILLED, RAISED, KILLED, KILLED))


def test_what_was_asked_for_wrongly_is_not_tried_again(run):
    wrong = Culprit(rank=0, node="node0", cause="no such file", usage=True)
    assert not ruled(run, wrong, most=9).again


def test_a_cancelled_run_stays_ended(run):
    run.cancel.touch()
    assert not ruled(run, KILLED, most=9).again
