"""What follows an attempt that ended: a table of the ends."""

import pytest

from orchestrator.clusters.slurm.decision import AttemptEnd, Decision, decide
from orchestrator.rundir.outcome import State
from orchestrator.rundir.restarts import FRUITLESS

LEFT = {"departed": True}
LOST = {"departed": True, "lost": True}
GRANTED = {"departed": True, "granted": True}
STAYS = {"may_restart": False}
CANCELLED = {"cancelled": True}
PROGRAM = {"program": True}


@pytest.mark.parametrize(
    ("state", "more", "decision"),
    [
        ("stopped", LEFT, Decision.RESTART),
        ("failed", LEFT, Decision.RESTART),
        (None, LOST, Decision.RESTART),
        ("stopped", LEFT | CANCELLED, Decision.STOP),
        ("failed", LEFT | CANCELLED, Decision.STOP),
        ("stopped", CANCELLED, Decision.STOP),
        (None, {"began": False} | CANCELLED, Decision.STOP),
        ("failed", CANCELLED, Decision.JUDGE_FAILURE),
        (None, CANCELLED, Decision.JUDGE_FAILURE),
        ("stopped", LEFT | STAYS, Decision.STOP_IN_QUEUE),
        ("stopped", LOST | STAYS, Decision.JUDGE_FAILURE),
        ("failed", LEFT | STAYS, Decision.JUDGE_FAILURE),
        ("stopped", {}, Decision.END),
        ("stopped", PROGRAM, Decision.END),
        ("finished", PROGRAM, Decision.END),
        ("finished", {}, Decision.JUDGE_FAILURE),
        ("failed", {}, Decision.JUDGE_FAILURE),
        (None, {}, Decision.JUDGE_FAILURE),
        ("failed", GRANTED, Decision.RESTART),
        ("failed", GRANTED | CANCELLED, Decision.STOP),
        ("failed", GRANTED | STAYS, Decision.JUDGE_FAILURE),
    ],
)
def test_an_end_has_one_consequence(state, more, decision):
    end = AttemptEnd(state=None if state is None else State(state), **more)
    assert decide(end, lambda: FRUITLESS - 1) is decision


@pytest.mark.parametrize(
    ("more", "decision"),
    [
        (LEFT, Decision.GIVE_UP),
        (LOST, Decision.GIVE_UP),
        (LOST | STAYS, Decision.GIVE_UP),
        (LOST | PROGRAM, Decision.GIVE_UP),
        (LEFT | PROGRAM, Decision.RESTART),
        (LEFT | CANCELLED, Decision.STOP),
        (GRANTED, Decision.RESTART),
        ({}, Decision.JUDGE_FAILURE),
    ],
)
def test_starts_that_never_make_progress_end_unless_that_cannot_be_known(more, decision):
    assert decide(AttemptEnd(state=State.FAILED, **more), lambda: FRUITLESS) is decision
