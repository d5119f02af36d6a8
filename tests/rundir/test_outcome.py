"""The effect of a stop."""

import pytest

from orchestrator.client.stop import Stop
from orchestrator.rundir.files import write_json
from orchestrator.rundir.outcome import describe_stop


@pytest.fixture
def program(run):
    write_json(run.plan, {"ranks": 2, "program": {"argv": ["a.py"], "stop_signal": "INT"}})
    return run


def test_only_a_job_class_has_boundary_and_checkpoint(program):
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
