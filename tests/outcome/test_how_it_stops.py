"""Whoever stops a run is told what that run does then: a job, a program, one whose ranks agree."""

import pytest

from orchestrator.inside.stop import Stop
from orchestrator.outcome.how_it_stops import how_it_stops
from orchestrator.run_folder.rundir import RunDir, write_json


@pytest.fixture
def run(tmp_path):
    found = RunDir(tmp_path / "run")
    found.create()
    write_json(found.plan, {"ranks": 2, "program": {"words": ["a.py"], "stop_signal": "INT"}})
    return found


def test_only_a_job_of_ours_is_said_to_have_a_boundary_and_a_checkpoint(run):
    assert "gets SIGINT" in how_it_stops(run)
    write_json(run.plan, {"ranks": 2})
    assert how_it_stops(run) == "stops at its next update boundary, with a checkpoint"


def test_a_program_stops_together_once_all_its_ranks_have_asked_in_this_attempt(run):
    for attempt in range(2):
        run.begin_attempt()
        for rank in range(2):
            assert "gets SIGINT" in how_it_stops(run)
            Stop(run.attempt(attempt), rank, 2).due(0)
        assert "once all its ranks are done with the same update" in how_it_stops(run)
