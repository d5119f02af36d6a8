"""Who may say that a run has ended, and what is made of answers that are none."""

import pytest

from orchestrator.clusters.slurm.outcome import reason
from orchestrator.clusters.slurm.root_cause import ending, srun_ended
from orchestrator.clusters.slurm.status import with_job
from orchestrator.errors import ClusterError
from orchestrator.report.status_tables import remark
from orchestrator.rundir.files import write_json
from orchestrator.rundir.status import from_folder
from orchestrator.slurm_client import (
    JOB_FIELDS,
    Answer,
    Job,
    JobStatus,
    SchedulerDown,
    accounted,
    read_job_status,
    read_queue,
)


def line(**values):
    made = {
        "State": "RUNNING", "RestartCnt": "0", "Requeue": "1", "PreemptTime": "N/A",
        "EndTime": "1795301031", "exit_code": "0", "Reason": "None", **values,
    }  # fmt: skip
    return "".join(f"{made[name]:<{width}}" for name, width in JOB_FIELDS.items()) + "\n"


NO_ANSWERS = [
    'squeue: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2"',
    "slurm_load_jobs error: Protocol authentication error",
    "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
    "slurm_load_jobs error: Something that nobody has thought of",
    "squeue: error: _parse_next_key: Parsing error at unrecognized key",
    "",
]


@pytest.mark.parametrize("words", NO_ANSWERS)
def test_an_error_never_means_that_a_job_is_gone(words):
    with pytest.raises(SchedulerDown):
        read_queue(Answer(1, "", words))
    assert read_queue(Answer(1, "", "slurm_load_jobs error: Invalid job id specified")) == {}


class Client:
    def __init__(self, answer):
        self.answer = answer

    def ask(self, *command):
        return self.answer


def test_accounting_that_is_off_is_told_from_accounting_that_is_silent():
    off = Answer(1, "", "Slurm accounting storage is disabled")
    assert accounted(Client(off), ["7"]) is None
    silent = Answer(1, "", "sacct: error: slurm_persist_conn_open_without_init: no")
    with pytest.raises(ClusterError, match="accounting gave no answer"):
        accounted(Client(silent), ["7"])


def test_a_jobs_standing_is_read_by_position_whatever_its_texts_hold():
    found = read_job_status(line(Reason="JobState=NONE Requeue=0", RestartCnt="3", exit_code="9"))
    assert (found.state, found.restarts, found.requeue) == ("RUNNING", 3, True)
    assert (found.exit_code, found.exit_signal, found.ends_at) == (0, 9, 1795301031.0)
    assert read_job_status("\n") is None


@pytest.mark.parametrize(
    ("values", "cancelled"),
    [
        ({"State": "RUNNING"}, False),
        ({"State": "COMPLETING"}, True),
        ({"State": "CANCELLED"}, True),
        ({"State": "COMPLETING", "Reason": "TimeLimit"}, False),
        ({"State": "COMPLETING", "Reason": "NodeDown"}, False),
        ({"State": "COMPLETING", "PreemptTime": "1795301031"}, False),
    ],
)
def test_a_job_that_a_person_ends_is_told_from_one_that_the_scheduler_takes(values, cancelled):
    assert read_job_status(line(**values)).cancelled == cancelled


def test_only_what_is_near_a_time_limit_is_called_so():
    def why(left_s, ahead_s, state="RUNNING"):
        return reason(JobStatus(state=state, ends_at=1000.0 + left_s), 1000.0, ahead_s)

    assert why(100, 60) == "near its time limit"
    assert why(100, 1) is None
    assert why(380, 300) == "near its time limit"
    assert why(-10, 60, "FAILED") is why(0, 60, "COMPLETING") is None  # that is when it ended
    assert reason(JobStatus(state="RUNNING", preempted_at=1.0), 9.0, 60) == "preempted"


def test_an_srun_that_is_killed_or_told_to_end_is_no_ranks_fault(run):
    assert srun_ended(run, 0) == "srun was killed"
    run.srun_log(0).write_text("srun: error: vm: task 1: Killed\n")
    assert srun_ended(run, 0) is None
    run.srun_log(0).write_text(
        "srun: forcing job termination\nsrun: error: vm: tasks 0-1: Killed\n"
    )
    assert srun_ended(run, 0) == "srun was told to end the job"


def test_the_rank_and_node_that_failed_are_in_the_status(run):
    write_json(run.plan, {})
    culprit = {"rank": 3, "node": "n1", "cause": "ValueError: x"}
    write_json(run.result, {"state": "failed", "updates": 3, "culprit": culprit})
    assert remark(from_folder(run)) == "rank 3 on n1: ValueError: x"


def test_the_end_of_a_job_whose_batch_script_died_is_explained_by_what_its_ranks_left(run):
    failed = Job(id="1", state="FAILED", nodes="n[0-1]", exit_signal=9)
    run.srun_log(0).touch()
    cause = ending(run, failed)[1].cause
    assert cause.endswith("its batch script was killed by signal 9 (SIGKILL)")
    blamed = {"rank": 1, "node": "n1", "cause": "x", "log_tail": []}
    write_json(run.outcome(0), {"state": "failed", "culprit": blamed, "lost": None})
    assert ending(run, failed)[1].rank == 1
    write_json(run.departure(0), {"why": "asked to stop by SIGTERM", "updates": 3})
    assert "left in order (asked to stop by SIGTERM)" in ending(run, failed)[1].cause
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
