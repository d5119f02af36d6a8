"""Reading what SLURM's commands say, and putting it into words."""

import pytest
import torch

from orchestrator.clusters.slurm.root_cause import culprit_without_outcome, ending
from orchestrator.clusters.slurm.submission import retry_unanswered
from orchestrator.errors import ClusterError
from orchestrator.rundir.files import write_json
from orchestrator.slurm_client import (
    Answer,
    Job,
    NoClient,
    SchedulerDown,
    SlurmClient,
    explained,
    read_queue,
)
from orchestrator.trainer.failure import describe


def test_squeue_is_read_and_an_unknown_job_is_simply_not_there():
    text = (
        "7|RUNNING|n[0-1]|59:30|0:30|1700000000|None|/r/000.sh\n"
        "8|PENDING||1:00|0:00|N/A|Priority|(null)\n"
    )
    jobs = read_queue(Answer(0, text, ""))
    assert jobs["7"].time_left_s == 3570
    assert jobs["7"].alive
    assert not jobs["7"].waiting
    assert (jobs["8"].waiting, jobs["8"].reason, jobs["8"].start) == (True, "Priority", None)
    assert read_queue(Answer(1, "", "slurm_load_jobs error: Invalid job id specified")) == {}


@pytest.mark.parametrize(
    "words",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
    ],
)
def test_a_silent_scheduler_is_told_from_a_refusal(words):
    assert Answer(1, "", words).down
    assert not Answer(1, "", "sbatch: error: invalid partition specified: x").down


def test_a_refusal_keeps_the_schedulers_words_and_adds_what_they_mean():
    said = explained("sbatch: error: Invalid generic resource (gres) specification")
    assert "Invalid generic resource (gres)" in said
    assert "cluster.gpus_per_node" in said


def test_submission_waits_for_a_scheduler_but_not_for_ever():
    told, calls = [], []

    def answer_at_last():
        calls.append(1)
        if len(calls) < 2:
            raise SchedulerDown("the scheduler does not answer")
        return "7"

    assert retry_unanswered(answer_at_last, patience_s=60, tell=told.append) == "7"
    assert "trying again" in told[0]

    def never():
        raise SchedulerDown("the scheduler does not answer")

    with pytest.raises(ClusterError, match="not submitted, though tried"):
        retry_unanswered(never, patience_s=0.5, tell=told.append)


def failure(run, rank, cause, *, secondary, time):
    write_json(
        run.failure(0, rank),
        {"rank": rank, "node": f"n{rank // 2}", "time": time, "cause": cause, "usage": False,
         "secondary": secondary, "exit_code": 1, "traceback": ""},
    )  # fmt: skip


def test_of_the_failures_the_first_that_is_its_own_is_blamed(run):
    run.srun_log(0).write_text("srun: error: vm: task 0: Killed\n")
    failure(run, 0, "PeerLost: z", secondary=True, time=0.5)
    assert culprit_without_outcome(run, 0, 137).cause == "PeerLost: z"
    failure(run, 3, "ValueError: x", secondary=False, time=2.0)
    failure(run, 1, "ValueError: y", secondary=False, time=1.0)
    run.rank_log(1).write_text("one\ntwo\n")
    culprit = culprit_without_outcome(run, 0, 1)
    assert (culprit.rank, culprit.node, culprit.cause) == (1, "n0", "ValueError: y")
    assert culprit.log_tail == ("one", "two")


def test_the_gpus_memory_counts_too(run):
    said = describe(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    failure(run, 1, said, secondary=False, time=1)
    cause = culprit_without_outcome(run, 0, 1).cause
    assert cause.startswith("out of memory: ")
    assert "accumulation.steps" in cause


@pytest.mark.parametrize(
    ("state", "ends", "words"),
    [
        ("CANCELLED", "stopped", "scancel"),
        ("TIMEOUT", "failed", "time limit"),
        ("NODE_FAIL", "failed", "a node failed"),
        ("OUT_OF_MEMORY", "failed", "out of memory"),
        ("FAILED", "failed", "without a result"),
    ],
)
def test_a_job_that_ended_without_a_result_is_explained(run, state, ends, words):
    found, culprit = ending(run, Job(id="1", state=state, nodes="n0"))
    assert found.value == ends
    assert words in culprit.cause


def test_a_machine_with_the_commands_but_no_cluster_is_told_from_one_that_does_not_answer():
    words = (
        "scontrol: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
        "scontrol: error: fetch_config: DNS SRV lookup failed\n"
        "scontrol: fatal: Could not establish a configuration source\n"
    )
    assert Answer(1, "", words).no_slurm_conf
    assert not Answer(1, "", words).down
    assert not Answer(1, "", "Unable to contact slurm controller (connect failure)").no_slurm_conf


def test_a_slurm_conf_that_is_not_there_is_said_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "gone.conf"))
    with pytest.raises(NoClient, match=r"gone\.conf: there is no such file"):
        SlurmClient()


@pytest.mark.parametrize(("code", "words"), [(137, "was killed by signal 9 (SIGKILL)"),
                                             (129, "was killed by signal 1 (SIGHUP)"),
                                             (128, "ended with code 128"),
                                             (1, "ended with code 1")])  # fmt: skip
def test_where_no_agent_is_named_it_is_srun_or_the_script_before_it(run, code, words):
    culprit = culprit_without_outcome(run, 0, code)
    assert culprit.cause == f"the batch script {words} before srun began (cluster.preamble)"
    run.srun_log(0).write_text("".join(f"srun: {n}\n\n" for n in range(40)) + "  \n")
    culprit = culprit_without_outcome(run, 0, code)
    assert (culprit.rank, culprit.node) == (None, "batch")
    assert culprit.cause == f"srun {words}: srun: 39"
    assert culprit.log_tail == tuple(f"srun: {n}" for n in range(10, 40))


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("one\n two \nthree\n\n", "three"),
        ("error: no such node\n", "no such node"),
        ("a\nValueError: x\n", "ValueError: x"),
        ("OSError: x\nduring that\nKeyError: a\nb\nc\nd\n", "KeyError: a b c"),
        ("torch.OutOfMemoryError: x\n", "torch.OutOfMemoryError: x"),
    ],
)
def test_an_agent_that_could_not_begin_is_told_by_its_last_exception_or_line(run, log, said):
    run.srun_log(0).write_text("srun: error: n1: task 1: Exited with exit code 1\n")
    run.node_log("node1").write_text(log)
    culprit = culprit_without_outcome(run, 0, 1)
    assert culprit.cause == f"the agent of node n1 exited with code 1: {said}"
    assert (culprit.rank, culprit.node) == (None, "n1")


def test_an_agent_that_left_no_log_is_told_by_srun(run):
    words = "srun: error: vm: task 0: Exited with exit code 127"
    run.srun_log(0).write_text(f"\nexec: python: not found\n{words}\n")
    culprit = culprit_without_outcome(run, 0, 127)
    assert culprit.cause == "srun ended with code 127: exec: python: not found"
    assert culprit.log_tail == ("exec: python: not found", words)
