"""An agent reports the ends of its workers although it can write or fork nothing."""

import errno
import os
import selectors
import shutil

import pytest

from orchestrator.agent import workers as module
from orchestrator.agent.programs import RankProgram
from orchestrator.agent.workers import Workers
from orchestrator.rundir.folder import RunDir
from tests.agent.specs import node_spec

FACTS = {"stop_signal": "TERM", "rendezvous": None, "serves": False, "most_s": 1.0,
         "restarts": True, "log_bytes": 0}  # fmt: skip


@pytest.mark.parametrize(("status", "state"), [(0, "finished"), (3, "failed"), (-9, "failed")])
def test_the_end_of_a_program_is_known_although_nothing_can_be_written(tmp_path, status, state):
    run = RunDir(tmp_path)
    program = RankProgram(node_spec(tmp_path), 0, os.getpid(), FACTS)
    run.attempts.write_text("no folder")  # so each write fails
    shutil.rmtree(run.logs, ignore_errors=True)
    found, failure = program.end(status)
    assert found == state
    assert (failure is not None) == (state == "failed")


@pytest.mark.parametrize("lacks", ["fork_session", "socket.socketpair"])
@pytest.mark.parametrize(("incarnation", "state"), [(0, "failed"), (1, "")])
def test_a_worker_that_cannot_be_forked_is_reported_with_the_reason(
    tmp_path, monkeypatch, incarnation, state, lacks
):
    def fork():
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(f"{module.__name__}.{lacks}", fork)
    events = []
    with selectors.DefaultSelector() as selector:
        workers = Workers(spec=node_spec(tmp_path), selector=selector, report=events.append)
        workers.start(0, incarnation)
        workers.start(0, incarnation)
    assert [event["final_state"] for event in events] == [state] * 2
    assert workers.exit_of(workers.all[0])["failure"] == events[1]["failure"]
    if not incarnation:
        assert "could not be started: Resource temporarily" in events[0]["failure"]["cause"]
