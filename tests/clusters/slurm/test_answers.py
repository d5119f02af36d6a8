"""Answers of SLURM's commands, read as values. No daemon is started."""

import pytest

from orchestrator.clusters.slurm.scheduler import (
    QUEUE_FIELDS,
    Answer,
    NoClient,
    SchedulerDown,
    SlurmClient,
    UnreadableAnswer,
    accounted,
    accounted_scripts,
    explained,
    queued,
    read_queue,
    retry_unanswered,
)
from orchestrator.errors import NotNow, describe_status
from orchestrator.rundir.srun_log import task_exits
from tests.clusters.slurm.queue_lines import queue_line
from tests.programs import script
from tests.refusals import refused

pytestmark = pytest.mark.whole_runs

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


BANNER = "*** The cluster is in maintenance | ask the help desk ***"
HEADER = "|".join(QUEUE_FIELDS)


def test_a_wrappers_banner_hides_no_job_and_reports_none_as_gone():
    assert [*read_queue(Answer(0, f"{BANNER}\n{HEADER}\n{queue_line()}\n{BANNER}", ""))] == ["7"]
    assert read_queue(Answer(0, f"{BANNER}\n{HEADER}\n", "")) == {}
    ended = f"{BANNER}\nJobID|State|ExitCode|NodeList\n7|FAILED|1:0|n1"
    assert accounted(Client(Answer(0, ended, "")), ["7"])["7"].state == "FAILED"
    for answer, line in ((BANNER, BANNER), (f"{HEADER}\n{queue_line()}\n8|RUNNING", "8|RUNNING")):
        with refused(UnreadableAnswer, f"squeue {line}"):
            read_queue(Answer(0, answer, ""))
    with refused(UnreadableAnswer, "sacct 7|RUNNING"):
        accounted(Client(Answer(0, "7|RUNNING", "")), ["7"])


def test_accounting_without_submit_lines_knows_no_script():
    old = Answer(1, "", 'sacct: fatal: Invalid field requested: "SubmitLine"')
    assert accounted_scripts(Client(old), 1000, since=0.0) == []


def squeue(**values):
    return list(read_queue(Answer(0, queue_line(**values), "")).values())


class Client:
    def __init__(self, answer):
        self.answer = answer

    def run(self, *command):
        return self.answer


def test_accounting_that_is_off_is_told_from_accounting_that_is_silent():
    off = Answer(1, "", "Slurm accounting storage is disabled")
    assert accounted(Client(off), ["7"]) == {}
    silent = Answer(1, "", "sacct: error: slurm_persist_conn_open_without_init: no")
    with refused(SchedulerDown, "sacct: error: slurm_persist_conn_open_without_init: no"):
        accounted(Client(silent), ["7"])


def test_ten_thousand_elements_are_asked_for_as_their_array():
    ids = [f"123456789_{n}" for n in range(10_000)]
    asked = []

    class Recording(Client):
        def run(self, *command):
            asked.append(command[command.index("-j") + 1])
            return self.answer

    others = "123456789_9999|RUNNING|0:0|n1\n123456789_10000|RUNNING|0:0|n1\n7_1|FAILED|1:0|n1\n"
    found = accounted(Recording(Answer(0, others, "")), [*ids, "7_1"])
    assert {job: one.state for job, one in found.items()} == {ids[-1]: "RUNNING", "7_1": "FAILED"}
    line = queue_line(JobArrayID="123456789_10000")
    assert queued(Recording(Answer(0, line, "")), ids) == {}
    assert asked == ["123456789,7_1", "123456789"]


def test_a_job_is_read_by_position_whatever_its_texts_hold():
    [found] = squeue(
        JobArrayID="7_3",
        EndTime="1795301031",
        RestartCnt="3",
        exit_code="9",
        TimeLeft="59:30",
        Reason="JobState=NONE Requeue=0",
        Command="/a|b/000.sh",
    )
    assert (found.id, found.state, found.restarts, found.requeue) == ("7_3", "RUNNING", 3, True)
    assert (found.exit_code, found.exit_signal, found.ends_at) == (0, 9, 1795301031.0)
    assert (found.command, found.time_left_s) == ("/a|b/000.sh", 3570)
    [waits] = squeue(State="PENDING", NodeList="(null)", Reason="Priority")
    assert (waits.waiting, waits.reason, waits.nodes, waits.ends_at) == (True, "Priority", "", None)


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
    assert squeue(**values)[0].cancelled == cancelled


@pytest.mark.parametrize(
    ("state", "alive", "waiting"),
    [
        ("RESV_DEL_HOLD", True, True),
        ("SPECIAL_EXIT", True, True),
        ("REVOKED", True, False),
        ("A_STATE_OF_A_LATER_SLURM", True, False),
        ("COMPLETING", True, False),
        ("COMPLETED", False, False),
        ("CANCELLED", False, False),
        ("DEADLINE", False, False),
    ],
)
def test_only_a_job_in_a_final_state_has_ended(state, alive, waiting):
    [job] = squeue(State=state)
    assert (job.alive, job.waiting) == (alive, waiting)


@pytest.mark.parametrize(
    ("words", "down", "no_conf"),
    [
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", 1, 0),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv", 1, 0),
        ("Job can not be altered now, try again later for job 77", 1, 0),
        ("sbatch: error: invalid partition specified: x", 0, 0),
        ("scontrol: fatal: Could not establish a configuration source", 0, 1),
    ],
)
def test_a_silent_scheduler_is_told_from_a_refusal_and_from_none(words, down, no_conf):
    assert (Answer(1, "", words).down, Answer(1, "", words).no_slurm_conf) == (down, no_conf)


def test_a_development_cluster_is_offered_only_where_slurms_commands_are_not(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    with refused(NoClient, "scontrol +cluster=slurm `python -m slurm up`"):
        SlurmClient().settings()
    text = "#!/bin/sh\necho 'Could not establish a configuration source' >&2; exit 1\n"
    script(tmp_path, text, "scontrol", run=True)
    with refused(NoClient, "scontrol SLURM_CONF") as error:
        SlurmClient().settings()
    assert "python -m slurm up" not in str(error.value)


def test_a_refusal_keeps_the_schedulers_words_and_adds_what_they_mean():
    refusal = "sbatch: error: Invalid generic resource (gres) specification"
    said = explained(refusal)
    assert "Invalid generic resource (gres)" in said
    assert "cluster.gpus_per_node" in said
    why = "sbatch: error: Requested mem_per_tres=gres:gpu:1024 but did not request any GPU.\n"
    assert "cluster.gpus_per_node" not in explained(f"{why}{refusal}")


def test_submission_waits_for_a_scheduler_but_not_for_ever():
    messages, calls = [], []

    def answer_at_last():
        calls.append(1)
        if len(calls) < 2:
            raise SchedulerDown("the scheduler does not answer")
        return "7"

    assert retry_unanswered(answer_at_last, patience_s=60, tell=messages.append) == "7"
    assert [message.partition(";")[0] for message in messages] == ["the scheduler does not answer"]

    def never():
        raise SchedulerDown("the scheduler does not answer")

    with refused(NotNow, "the scheduler does not answer job 7 not ended"):
        retry_unanswered(never, patience_s=0.5, tell=messages.append, undone="job 7 is not ended")


def test_a_slurm_conf_that_is_not_there_is_said_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "gone.conf"))
    with refused(NoClient, f"SLURM_CONF={tmp_path}/gone.conf") as caught:
        SlurmClient()
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_tasks_are_read_in_srun_s_order_each_with_its_node_and_how_it_ended():
    log = (
        "before\n"
        "srun: error: gpu-7: tasks 0,2-3: Exited with exit code 137 \n"
        "srun: error: vm: task 9: Segmentation fault (core dumped)\n"
        "srun: error: vm: task 10: Terminated\n"
        "srun: error: vm: task 11: Out Of Memory\n"
        "slurmstepd: error: task 5: nothing of srun's\n"
    )
    assert [(one.rank, one.node, one.description) for one in task_exits(log)] == [
        *((rank, "gpu-7", describe_status(-9)) for rank in (0, 2, 3)),
        (9, "vm", describe_status(-11)),
        (10, "vm", describe_status(-15)),
        (11, "vm", "ended: Out Of Memory"),
    ]
