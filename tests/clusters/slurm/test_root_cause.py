"""Reading what SLURM's commands say, and putting it into words."""

import pytest
import torch

from orchestrator.clusters.slurm.admission import (
    Each,
    Wanted,
    _grace_of_qos,
    exceeded,
    grace_s,
    misfit,
    preempt_grace_s,
    read_limits,
    read_partitions,
    too_slow,
    wanted,
)
from orchestrator.clusters.slurm.root_cause import culprit_without_outcome, ending
from orchestrator.clusters.slurm.submission import retry_unanswered
from orchestrator.config.schema import Config
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

PARTITIONS = (
    "PartitionName=main AllowGroups=ALL Default=YES GraceTime=0 MaxNodes=UNLIMITED "
    "MaxTime=UNLIMITED PreemptMode=OFF State=UP TotalNodes=4\n"
    "PartitionName=low Default=NO GraceTime=20 MaxNodes=2 MaxTime=1-00:00:00 "
    "PreemptMode=REQUEUE State=UP TotalNodes=4\n"
    "PartitionName=old Default=NO GraceTime=0 MaxNodes=UNLIMITED MaxTime=30:00 PreemptMode=OFF "
    "State=DOWN TotalNodes=4\n"
    "PartitionName=shut Default=NO GraceTime=0 MaxNodes=UNLIMITED MinNodes=2 MaxTime=UNLIMITED "
    "MaxCPUsPerNode=6 PreemptMode=OFF State=DRAIN TotalNodes=4\n"
)
SHAPES = "main|3|8|16384|gpu:a100:4(S:0-1)\nmain|1|64|256000|gpu:h100:8,npu:2\n"


def config(**cluster):
    made = Config()
    made.cluster.kind = "slurm"
    for name, value in cluster.items():
        setattr(made.cluster, name, value)
    return made


def test_partitions_are_read_with_their_limits():
    found = read_partitions(PARTITIONS)
    assert found["main"].is_default
    assert found["main"].allows.minutes is None
    low = found["low"]
    assert (low.allows.max_nodes, low.allows.minutes, low.grace_s) == (2, 1440, 20)
    assert not found["old"].up
    assert found["old"].open
    assert not found["shut"].open


def test_what_a_partition_never_gives_is_found_although_slurm_would_take_it():
    found = read_partitions(PARTITIONS)
    assert misfit(Wanted(nodes=2), found["low"]) is None
    assert "gives 2 at most" in misfit(Wanted(nodes=3), found["low"])
    assert "try cluster.time_min=1440" in misfit(Wanted(minutes=1441), found["low"])
    assert misfit(Wanted(), found["old"]) is None  # it is down, not closed: a job waits there
    assert "takes no jobs" in misfit(Wanted(most_nodes=2), found["shut"])
    assert "gives 2 at least" in misfit(Wanted(most_nodes=1), found["shut"])
    assert "6 CPUs of a node at most" in misfit(
        Wanted(most_nodes=2, each=Each(cpus=7)), found["shut"]
    )


@pytest.mark.parametrize(
    ("nodes", "options", "against"),
    [
        (4, {}, None),
        (3, {"gpus-per-node": "a100:4"}, None),
        (4, {"gpus-per-node": "a100:4"}, "4 gpu:a100"),
        (4, {"gpus-per-node": "4"}, None),
        (2, {"gpus-per-node": "8"}, "has 8 at most"),
        (1, {"gpus-per-node": "9"}, "has 8 at most"),
        (1, {"gres": "npu:2"}, None),
        (2, {"gres": "npu:2"}, "2 npu"),
        (1, {"gres": "none"}, None),
        (1, {"mem": "200000M"}, None),
        (2, {"mem": "200G"}, "cluster.memory_gib"),
        (1, {"mem": "200000M", "gpus-per-node": "a100:1"}, "too few nodes with all"),
    ],
)
def test_what_no_configured_node_has_can_never_run(nodes, options, against):
    main = read_partitions(PARTITIONS, SHAPES)["main"]
    said = misfit(wanted(options, nodes=(nodes, nodes), cpus=8), main)
    assert (said is None) if against is None else against in said


def test_cpus_are_those_of_a_nodes_ranks_unless_they_may_be_overcommitted():
    main = read_partitions(PARTITIONS, SHAPES)["main"]
    assert "cluster.cpus_per_rank" in misfit(wanted({}, nodes=(2, 2), cpus=9), main)
    assert misfit(wanted({"overcommit": True}, nodes=(2, 2), cpus=9), main) is None


def test_the_limits_of_accounting_are_for_the_whole_job():
    # As sacctmgr prints MaxTRES, GrpTRES and MaxWall of an association.
    limits = list(read_limits("account dev", ("gres/gpu=2,mem=8G,node=2", "cpu=4"), "00:30:00"))
    job = wanted({"time": 30, "mem": "4096M", "gpus-per-node": 1}, nodes=(2, 2), cpus=2)
    assert list(exceeded(job, limits)) == []
    more = wanted({"time": "31", "mem": "5G", "gpus-per-node": "a:2"}, nodes=(3, 3), cpus=2)
    said = " / ".join(exceeded(more, limits))
    for words in ("3 of node, but account dev allows 2", "15360 MB", "6 of gres/gpu", "6 of cpu"):
        assert words in said
    assert "31 minutes, but account dev allows 30" in said


def test_the_grace_is_the_shorter_of_notice_and_preemption():
    found = read_partitions(PARTITIONS)
    main, low = (preempt_grace_s([found[name]]) for name in ("main", "low"))
    assert grace_s(config(), main) == 60
    assert grace_s(config(), low) == 20
    assert grace_s(config(signal_ahead_s=5), low) == 5


def test_the_grace_of_a_preemption_is_whose_site_decides_it_and_the_suspended_have_none():
    low = [read_partitions(PARTITIONS)["low"]]
    by_qos, by_none = "PreemptType             = preempt/qos", "PreemptType = preempt/none"
    assert preempt_grace_s(low, "PreemptType = preempt/partition_prio", 15.0) == 20
    assert preempt_grace_s(low, by_qos, 15.0) == 15
    assert preempt_grace_s(low, by_qos) is preempt_grace_s(low, by_none, 15.0) is None
    assert "PreemptMode=REQUEUE" in PARTITIONS
    suspended = read_partitions(
        PARTITIONS.replace("PreemptMode=REQUEUE", "PreemptMode=GANG,SUSPEND")
    )
    assert preempt_grace_s([suspended["low"]]) is None


def test_a_qos_that_another_may_preempt_has_its_own_grace():
    # As sacctmgr prints a qos: limits, MaxWall, GraceTime, and those that it may preempt.
    qualities = {row[0]: row for row in (
        ["normal", "", "", "", "", "00:00:00", ""], ["low", "", "", "", "", "00:00:15", ""],
        ["high", "", "", "", "", "00:00:00", "low,scavenge"],
    )}  # fmt: skip
    own = ["dev", "", "", "", "", "low"]
    assert _grace_of_qos(wanted({"qos": "low"}, nodes=(1, 1), cpus=1), [], qualities) == 15
    assert _grace_of_qos(wanted({}, nodes=(1, 1), cpus=1), [own], qualities) == 15
    assert _grace_of_qos(wanted({}, nodes=(1, 1), cpus=1), [], qualities) is None


def test_updates_longer_than_the_grace_are_told_before_queueing():
    made = config()
    assert too_slow(made, 20) is None
    made.facts.update_s = 19
    assert too_slow(made, 20) is None
    made.facts.update_s = 45.5
    assert "cluster.signal_ahead_s=46" in too_slow(made, 20)


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
