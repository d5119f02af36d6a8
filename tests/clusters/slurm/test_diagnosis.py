"""The root cause of an attempt that has no outcome, and the status of its run."""

import pytest

from orchestrator.clusters.slurm.diagnosis import CAUSES, SRUN_ENDED, culprit_of, diagnose
from orchestrator.clusters.slurm.scheduler import ScheduledJob
from orchestrator.clusters.slurm.status import with_job
from orchestrator.report.status_tables import remark
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.status import from_folder
from tests.refusals import mentions
from tests.run_folders import write_failure


@pytest.fixture
def run(begun):
    return begun


def test_of_the_failures_the_first_that_is_its_own_is_blamed(run):
    run.srun_log(0).write_text("srun: error: vm: task 0: Killed\n")
    write_failure(run, 0, "PeerLost: z", secondary=True, time=0.5)
    assert culprit_of(run, 0, 137).cause == "PeerLost: z"
    write_failure(run, 3, "ValueError: x", time=2.0)
    write_failure(run, 1, "ValueError: y", time=1.0)
    run.rank_log(1).write_text("one\ntwo\n")
    culprit = culprit_of(run, 0, 1)
    assert (culprit.rank, culprit.node, culprit.cause) == (1, "node1", "ValueError: y")
    assert culprit.log_tail == ("one", "two")


@pytest.mark.parametrize(
    ("state", "ends"),
    [
        ("CANCELLED", "stopped"),
        ("TIMEOUT", "failed"),
        ("NODE_FAIL", "failed"),
        ("OUT_OF_MEMORY", "failed"),
        ("FAILED", "failed"),
    ],
)
def test_a_job_that_ended_without_a_result_is_explained(run, state, ends):
    found, culprit = diagnose(run, ScheduledJob(id="1", state=state, nodes="n0"))
    assert found.value == ends
    if state in CAUSES:
        assert culprit.cause == CAUSES[state]
    else:
        assert mentions(culprit.cause, "(FAILED)")


@pytest.mark.parametrize(
    ("last", "quoted"),
    [
        ("ModuleNotFoundError: No module named 'orchestrator.rundir'\n\n", True),
        ("bash: line 9: /site/python: No such file or directory\n", True),
        ("attempt 1 starts the program again\n", False),
    ],
)
@pytest.mark.parametrize("attempted", [True, False])
def test_what_the_script_ended_with_is_quoted(run, tmp_path, last, quoted, attempted):
    if not attempted:
        run = RunDir(tmp_path / "waiting")
        run.create()
    run.logs.mkdir(exist_ok=True)
    run.batch_log.write_text(f"Traceback (most recent call last):\n{last}")
    cause = diagnose(run, ScheduledJob(id="1", state="FAILED", nodes="n0", exit_code=1))[1].cause
    assert mentions(cause, f"1 ({last.strip()})") == quoted
    assert mentions(cause, f"{run.path} n0") == (not quoted and not attempted)
    killed = ScheduledJob(id="1", state="FAILED", nodes="n0", exit_signal=9)
    assert last.strip() not in diagnose(run, killed)[1].cause  # it may be an earlier job's


@pytest.mark.parametrize(
    ("code", "names"),
    [
        (137, "signal 9 (SIGKILL)"),
        (129, "signal 1 (SIGHUP)"),
        (128, "code 128"),
        (1, "code 1"),
    ],
)
def test_where_no_agent_is_named_it_is_srun_or_the_script_before_it(run, code, names, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    culprit = culprit_of(run, 0, code)
    assert culprit.node == "n7"
    assert mentions(culprit.cause, f"script n7 {names} srun (cluster.preamble)"), culprit.cause
    run.srun_log(0).write_text("".join(f"srun: {n}\n\n" for n in range(40)) + "  \n")
    culprit = culprit_of(run, 0, code)
    assert (culprit.rank, culprit.node) == (None, "batch")
    srun, _, last = culprit.cause.partition(": ")
    assert (mentions(srun, f"srun {names}"), last) == (True, "srun: 39")
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
    culprit = culprit_of(run, 0, 1)
    agent, _, words = culprit.cause.partition(": ")
    assert (mentions(agent, "agent n1 code 1"), words) == (True, said)
    assert (culprit.rank, culprit.node) == (None, "n1")


@pytest.mark.parametrize(
    ("first", "cause"), [("", SRUN_ENDED), ("srun: error: Node failure on n1\n", "node n1 failed")]
)
def test_a_step_that_was_ended_from_outside_is_the_fault_of_no_rank(run, first, cause):
    run.srun_log(0).write_text(f"{first}srun: Job step aborted\nsrun: error: n1: task 1: Killed\n")
    run.node_log("node1").write_text("INFO: the last line\n")
    assert culprit_of(run, 0, 137).cause == cause
    write_failure(run, 0, "y", secondary=True)
    assert culprit_of(run, 0, 137).cause == cause
    write_failure(run, 0, "y")
    assert culprit_of(run, 0, 137).cause == "y"


def test_an_agent_that_left_no_log_is_told_by_srun(run):
    words = "srun: error: vm: task 0: Exited with exit code 127"
    run.srun_log(0).write_text(f"\nexec: python: not found\n{words}\n")
    culprit = culprit_of(run, 0, 127)
    srun, _, said = culprit.cause.partition(": ")
    assert (mentions(srun, "srun code 127"), said) == (True, "exec: python: not found")
    assert culprit.log_tail == ("exec: python: not found", words)


def test_the_end_of_a_job_whose_batch_script_died_is_explained_by_what_its_ranks_left(run):
    failed = ScheduledJob(id="1", state="FAILED", nodes="n[0-1]", exit_signal=9)
    run.srun_log(0).touch()
    cause = diagnose(run, failed)[1].cause
    assert mentions(cause, "(FAILED) script signal 9 (SIGKILL)"), cause
    blamed = {"rank": 1, "node": "n1", "cause": "x", "log_tail": []}
    write_json(run.outcome(0), {"state": "failed", "culprit": blamed, "lost": None})
    assert diagnose(run, failed)[1].rank == 1
    write_json(run.departure(0), {"why": "asked to stop by SIGTERM", "updates": 3})
    cause = diagnose(run, failed)[1].cause
    assert mentions(cause, f"{IN_ORDER} (asked to stop by SIGTERM) signal 9 (SIGKILL)"), cause
    assert not run.result.exists()


IN_ORDER = "left in order"


@pytest.mark.parametrize("how", [{"lost": True}, {"failed": {"attempt": 0, "update": 3}}])
def test_a_restart_that_was_granted_after_a_loss_is_not_said_to_follow_an_orderly_end(run, how):
    job = ScheduledJob(id="1", state="FAILED", nodes="n[0-1]", exit_signal=9)
    write_json(run.decision(0), {"why": "node n1 failed", "updates": 3, **how})
    cause = diagnose(run, job)[1].cause
    assert mentions(cause, "(node n1 failed) script signal 9 (SIGKILL)"), cause
    assert IN_ORDER not in cause


def test_a_job_that_lives_is_the_later_word_than_a_file(run):
    write_json(run.plan, {})
    culprit = {"rank": 1, "node": "n1", "cause": "x"}
    write_json(run.result, {"state": "failed", "updates": 3, "culprit": culprit})
    for state, words in [("PENDING", "ending"), ("RUNNING", "ending"), ("FAILED", "failed")]:
        found = with_job(run, from_folder(run), ScheduledJob(id="1", state=state, nodes="n0"))
        assert found.state == words
        assert remark(found).startswith("job 1" if state == "PENDING" else "rank 1 on n1: x")


@pytest.mark.parametrize(
    ("state", "way_on"), [("STOPPED", "`scancel -s CONT 7`"), ("SUSPENDED", "`scontrol resume 7`")]
)
def test_a_job_that_stands_still_as_a_whole_says_what_lets_it_go_on(run, state, way_on):
    write_json(run.plan, {})
    found = with_job(run, from_folder(run), ScheduledJob(id="7", state=state, nodes="n0"))
    assert way_on in remark(found)
    assert with_job(run, from_folder(run), ScheduledJob(id="7", state="RUNNING")).reason is None
