"""The status of a run by its folder and the scheduler's answer."""

import pytest

from orchestrator.clusters.slurm.root_cause import diagnose
from orchestrator.clusters.slurm.status import with_job
from orchestrator.report.status_tables import remark
from orchestrator.rundir.files import write_json
from orchestrator.rundir.status import from_folder
from orchestrator.slurm_client import Job


def test_the_rank_and_node_that_failed_are_in_the_status(run):
    write_json(run.plan, {})
    culprit = {"rank": 3, "node": "n1", "cause": "ValueError: x"}
    write_json(run.result, {"state": "failed", "updates": 3, "culprit": culprit})
    assert remark(from_folder(run)) == "rank 3 on n1: ValueError: x"


def test_the_end_of_a_job_whose_batch_script_died_is_explained_by_what_its_ranks_left(run):
    failed = Job(id="1", state="FAILED", nodes="n[0-1]", exit_signal=9)
    run.srun_log(0).touch()
    cause = diagnose(run, failed)[1].cause
    assert cause.endswith("its batch script was killed by signal 9 (SIGKILL)")
    blamed = {"rank": 1, "node": "n1", "cause": "x", "log_tail": []}
    write_json(run.outcome(0), {"state": "failed", "culprit": blamed, "lost": None})
    assert diagnose(run, failed)[1].rank == 1
    write_json(run.departure(0), {"why": "asked to stop by SIGTERM", "updates": 3})
    assert "left in order (asked to stop by SIGTERM)" in diagnose(run, failed)[1].cause
    assert not run.result.exists()


def test_a_job_that_lives_is_the_later_word_than_a_file(run):
    write_json(run.plan, {})
    write_json(run.result, {"state": "failed", "updates": 3, "culprit": {"cause": "x"}})
    for state, words in [("PENDING", "ending"), ("RUNNING", "ending"), ("FAILED", "failed")]:
        found = with_job(run, from_folder(run), Job(id="1", state=state, nodes="n0"))
        assert found.state == words


@pytest.mark.parametrize(
    ("state", "way_on"), [("STOPPED", "`scancel -s CONT 7`"), ("SUSPENDED", "`scontrol resume 7`")]
)
def test_a_job_that_stands_still_as_a_whole_says_what_lets_it_go_on(run, state, way_on):
    write_json(run.plan, {})
    found = with_job(run, from_folder(run), Job(id="7", state=state, nodes="n0"))
    assert way_on in remark(found)
    assert with_job(run, from_folder(run), Job(id="7", state="RUNNING")).reason is None
