"""Who failed first, where little is known."""

import pytest

from orchestrator.rundir import RunDir
from orchestrator.submit.blame import blame


@pytest.mark.parametrize(
    ("log", "status", "cause"),
    [
        ("update 1\nerror: the scheduler ended\n", 1, "the scheduler ended"),
        ("error: long ago\nupdate 2\n", 1, "exited with code 1"),
        ("error: then somebody killed it\n", -9, "killed by signal 9 (SIGKILL)"),
        ("", 3, "exited with code 3"),
    ],
)
def test_a_rank_that_wrote_no_failure_is_heard_by_its_logs_last_word(tmp_path, log, status, cause):
    run = RunDir(tmp_path / "run")
    run.create()
    run.logs.mkdir(exist_ok=True)
    run.rank_log(1).write_text(log)
    culprit = blame(run, 0, "node1", 1, status)
    assert (culprit.rank, culprit.node, culprit.cause) == (1, "node1", cause)
    assert culprit.log_tail == tuple(log.splitlines())
