"""What follows an attempt that ended, by what it left: another start, or an end and its culprit."""

import contextlib
import errno
import json
import math
import os
import re
import signal
import socket
import threading
import time
from dataclasses import replace

import pytest

from orchestrator.agent.links import ANSWER, authenticate
from orchestrator.agent.node import node_spec as agent_spec
from orchestrator.agent.node_spec import publish_agent, secret_of
from orchestrator.clusters.api import Culprit
from orchestrator.clusters.slurm.diagnosis import (
    AGENTS_KILLED,
    SRUN_ENDED,
    SRUN_FAILED,
    SRUN_KILLED,
    culprit_of,
)
from orchestrator.clusters.slurm.finalize import (
    CAUSES,
    KILLED,
    MARGIN_S,
    NOT_REQUEUED,
    POLL_S,
    REACH_S,
    Next,
    _await_agents,
    _count_new_srun,
    _cut_short,
    _daemons_listen,
    _is_usable,
    finalize_in_job,
    finalize_patiently,
    finalize_without_script,
    print_note,
    restart_or_end,
)
from orchestrator.clusters.slurm.node_entry import after
from orchestrator.clusters.slurm.scheduler import Answer, ScheduledJob, SchedulerDown, SlurmClient
from orchestrator.clusters.slurm.status import with_job
from orchestrator.clusters.slurm.task import _Watch, is_served, set_nodes
from orchestrator.config.schema import Config, RunConfig
from orchestrator.errors import START_AGAIN, ClusterError, RunFolderError
from orchestrator.rundir.files import DISK_POLL_S, read_json, write_json
from orchestrator.rundir.outcome import NO_RESULT, departure_note, read_outcome
from orchestrator.rundir.restarts import FRUITLESS
from orchestrator.rundir.srun_log import REQUEUED_BY_OTHERS
from orchestrator.rundir.status import from_folder
from tests.agent.specs import node_spec
from tests.clusters.slurm.queue_lines import queue_line
from tests.helpers import SMALL, TINY, await_exit, begin, node_process, records, until
from tests.refusals import mentions, refused
from tests.run_folders import make_run, record, write_failure

pytestmark = pytest.mark.whole_runs

BEYOND = Culprit(rank=3, node="n1", cause="exited with code 5")
JOB = ScheduledJob(id="77", state="RUNNING")
LEFT = {"why": "told to stop", "updates": 4, "time": 1.0}

KILLED_TASK = "srun: error: n0: task 0: Exited with exit code 137\n"
MISSING = "srun: error: Aborting, io error and missing step on node"


def failure_of(node):
    """Return why an attempt ended whose node failed, by srun's log."""
    return f"node {node} failed"


@pytest.fixture
def run(run):
    cluster = {"signal_ahead_s": 60, "hang_timeout_s": 1000.0}
    configure(run, job={}, run={"max_restarts": 0}, cluster=cluster)
    return run


def configure(folder, **sections):
    """Set sections of its config.yaml."""
    before = folder.read_config() if folder.config.exists() else {}
    folder.write_config(json.dumps({**before, **sections}))


def attempts(run, starts, *, updates=4, resumed_from=None):
    """So many starts, each but the first from a checkpoint; the number of the last."""
    for number in range(starts):
        run.begin_attempt()
        if number:
            begun = updates if resumed_from is None else resumed_from[number]
            note = {"attempt": number - 1, "why": "x", "resumed_from": begun, "lost_updates": 0}
            write_json(run.restart(number), note)
    return starts - 1


def ended(run, attempt, state, *, culprit=None, lost=None):
    """Write how the attempt ended, as its coordinator does."""
    culprit = culprit and {**culprit.to_json(), "usage": False, "hangs": False}
    write_json(run.outcome(attempt), {"state": state, "culprit": culprit, "lost": lost})


def test_a_refused_requeue_is_one_message(run, monkeypatch):
    refusal = "scontrol requeue 77: Access/permission denied"

    def finalize(*_):
        raise ClusterError(refusal)

    monkeypatch.setattr("orchestrator.clusters.slurm.finalize.finalize_in_job", finalize)
    with refused(SystemExit, f"error: {refusal}; resume") as ended_with:
        after(str(run.path), "0", "0", "")
    assert "\n" not in ended_with.value.code


@pytest.mark.parametrize("follows", list(Next))
def test_a_coordinator_without_a_script_ends_only_a_job_whose_run_ended(run, monkeypatch, follows):
    """Else it was requeued meanwhile, and `scancel` would end the start that follows."""
    commands = []
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setattr(f"{finalize_in_job.__module__}.finalize_in_job", lambda *_, **__: follows)
    monkeypatch.setattr(SlurmClient, "check_output", lambda _, *command: commands.append(command))
    finalize_without_script(run, 0, "its batch script was killed")
    assert commands == ([("scancel", "77")] if follows is Next.END else [])


def test_finalization_waits_for_space_on_a_full_disk(run, monkeypatch):
    full = [OSError(code, os.strerror(code)) for code in (errno.ESTALE, *[errno.ENOSPC] * 3)]
    monkeypatch.setattr("time.sleep", lambda _: None)

    def finalize(*_):
        if full:
            raise full.pop()
        return Next.NEW_SRUN

    monkeypatch.setattr("orchestrator.clusters.slurm.finalize.finalize_in_job", finalize)
    with pytest.raises(SystemExit) as ended_with:
        after(str(run.path), "0", "0", "")
    assert (ended_with.value.code, full) == (START_AGAIN, [])
    full = [OSError(errno.EIO, os.strerror(errno.EIO))]
    monkeypatch.setattr("orchestrator.rundir.files.READ_PATIENCE_S", 0.0)
    with pytest.raises(OSError, match="Input/output"):
        after(str(run.path), "0", "0", "")


STALE = OSError(errno.ESTALE, os.strerror(errno.ESTALE))


@pytest.mark.parametrize(
    ("cause", "failures", "code"),
    [
        (STALE, 3, START_AGAIN),
        (STALE, math.inf, None),
        (FileNotFoundError(), 1, None),
        (None, 1, None),  # it is damaged
    ],
)
def test_finalization_waits_for_a_file_system_that_does_not_answer(
    run, monkeypatch, cause, failures, code
):
    calls = 0
    monkeypatch.setattr("time.sleep", lambda _: None)
    if failures == math.inf:
        monkeypatch.setattr("orchestrator.rundir.files.READ_PATIENCE_S", 0.0)

    def finalize(*_):
        nonlocal calls
        calls += 1
        if calls <= failures:
            raise RunFolderError("outcome.json cannot be read") from cause
        return Next.NEW_SRUN

    monkeypatch.setattr("orchestrator.clusters.slurm.finalize.finalize_in_job", finalize)
    with pytest.raises(SystemExit) as ended_with:
        after(str(run.path), "0", "0", "")
    if code is None:
        assert mentions(ended_with.value.code, "error: outcome.json resume"), ended_with.value.code
    else:
        assert ended_with.value.code == code
    assert calls == {3: 4, 1: 1}.get(failures, calls)


def test_an_outcome_that_a_full_disk_did_not_take_is_written_once_there_is_space(run, monkeypatch):
    attempts(run, 1)
    outcome = {"state": "failed", "culprit": None, "lost": "node n1 stopped answering"}
    full = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]

    def write(path, table):
        if full:
            raise full.pop()
        write_json(path, table)

    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr("orchestrator.clusters.slurm.task.write_json", write)
    _Watch(run, 0, node_spec(run.path)).on_outcome(outcome, False)
    assert read_outcome(run, 0).lost == outcome["lost"]


def test_a_lost_agent_is_asked_for_after_its_parents_time_and_ever_more_seldom(run, monkeypatch):
    attempts(run, 1)
    watch, request, asked_at = _Watch(run, 0, node_spec(run.path)), run.start_agent(0, 2), []
    for second in range(300):
        monkeypatch.setattr("time.monotonic", lambda second=second: second)
        watch.beat([2] if second > 10 else [])
        if request.exists():
            assert request.read_text() == "node2\n"
            request.unlink()
            asked_at.append(second)
    assert asked_at == [16, 76, 196]


def test_a_request_for_an_agent_that_is_back_is_withdrawn(run, monkeypatch):
    attempts(run, 1)
    watch, request = _Watch(run, 0, node_spec(run.path)), run.start_agent(0, 2)
    for second in range(10):  # the script is stopped, as its node was
        monkeypatch.setattr("time.monotonic", lambda second=second: second)
        watch.beat([2])
    assert request.exists()
    watch.beat([])
    assert not request.exists()


def test_an_agent_that_was_stopped_and_lives_is_not_replaced(tmp_path):
    """A node is frozen for 8 to 15 s, and its agent is back when the second one is to begin."""
    run = tmp_path / "run"
    launcher = begin(
        TINY,
        SMALL,
        "cluster.nodes=2",
        "cluster.ranks_per_node=1",
        "job.pause_s=0.05",
        "train.updates=100000",
        "run.survive=true",
        f"run.dir={run}",
    )
    until(lambda: records(run), what="training")
    second = node_spec(run, nodes=2, index=1, incarnation=1)
    agent = node_process(run, "node1")
    until(lambda: is_served(second), what="the agent's first answer")
    agent.suspend()
    assert not is_served(second)
    agent.resume()
    until(lambda: is_served(second), what="the agent's answer")
    launcher.send_signal(signal.SIGINT)
    await_exit(launcher, 3)
    assert not is_served(second)


def test_an_agent_that_is_started_again_knows_all_nodes_of_the_attempt(run, monkeypatch):
    attempts(run, 1)
    for index in range(3):
        write_json(run.node_ranks(0, index), {"node": f"n{index + 4}", "ranks": [index]})
    step = {
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "n5",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "1",
    }
    own = {"ORCHESTRATOR_BASE_ATTEMPT": "0", "SLURMD_NODENAME": "n5", "SLURM_JOB_ID": "7"}
    for name, value in {**step, **own, "ORCHESTRATOR_NODE_ADDRESS": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_RESTART_COUNT"):
        monkeypatch.setenv(name, "")  # so that it is restored
    config = Config(run=RunConfig(survive=True))
    set_nodes(run.path)
    assert (os.environ["SLURM_JOB_NODELIST"], os.environ["SLURM_NODEID"]) == ("n5", "0")
    monkeypatch.setenv("ORCHESTRATOR_NODE_INDEX", "00001")
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    set_nodes(run.path)
    spec = agent_spec(run, 0, config, os.environ)
    assert (spec.index, spec.names, spec.incarnation) == (1, ("n4", "n5", "n6"), 0)
    publish_agent(spec, 1)
    assert agent_spec(run, 0, config, os.environ).incarnation == 1


def why_cut_short(*how):
    note = _cut_short(*how)
    return note and note["why"]


def decided(run, attempt, job, *, culprit, **how):
    """Return whether the run starts again, and the pause before each restart that it asks for."""
    pauses = []

    def restart(pause_s=0.0):
        pauses.append(pause_s)

    again = restart_or_end(run, attempt, job, culprit=lambda: culprit, restart=restart, **how)
    return again, pauses


def concluded(run, attempt, *, job=JOB, departure=LEFT, culprit=BEYOND, in_place=False):
    """(whether it starts again, how often it was handed back, the end that was written)."""
    ways = {"departure": departure, "culprit": culprit, "in_place": in_place}
    again, pauses = decided(run, attempt, job, **ways)
    return again, len(pauses), run.read_result()


def pauses_of(run, attempt, capsys):
    """How long the start after this failed one waits, and the line in batch.log."""
    again, [pause_s] = decided(run, attempt, JOB, departure=None, culprit=BEYOND, tell=print_note)
    assert again
    (line,) = capsys.readouterr().out.splitlines()
    return pause_s, line


@pytest.fixture
def crashing(run, monkeypatch):
    """A program that may be restarted 100 times, and a clock that stands still."""
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now)
    configure(run, job={"command": ["false"]}, run={"max_restarts": 100})
    write_json(run.plan, {"ranks": 1, "program": {"argv": ["false"]}})
    return run


def test_restarts_of_a_program_that_fails_at_once_follow_ever_more_slowly(crashing, capsys):
    pauses = []
    for attempt in range(10):
        crashing.begin_attempt()
        pause_s, line = pauses_of(crashing, attempt, capsys)
        pauses.append(pause_s)
        assert mentions(line, f"restart {attempt + 1} 100 run.max_restarts"), line
        pause = read_json(crashing.decision(attempt)).get("pause")
        assert (pause is not None) == (pause_s > 0)
        assert pause is None or line.endswith(pause["why"])
    assert pauses == [0, 0, 30, 60, 120, 240, 480, 600, 600, 600]
    assert mentions(pause["why"], "10 times 1 s"), pause["why"]
    # A second may pass between the note and the line.
    assert re.search(r"; restart 10 in (10|9) min \d\d s: ", line)
    waits = ScheduledJob(id="77", state="PENDING", reason="BeginTime")
    reason = with_job(crashing, from_folder(crashing), waits).reason
    assert pause["why"] in reason
    held = replace(waits, reason="JobHeldUser")
    assert "`scontrol release 77`" in with_job(crashing, from_folder(crashing), held).reason


@pytest.mark.parametrize("progress", ["reported", "ran for a minute", "preempted"])
def test_a_start_that_made_progress_or_was_stopped_renews_restarts_at_once(
    crashing, capsys, progress
):
    for attempt in range(5):
        crashing.begin_attempt()
        if attempt == 3:
            if progress == "reported":
                crashing.metrics.write_text(json.dumps(record(7, attempt=3)) + "\n")
            elif progress == "preempted":
                write_json(crashing.departure(3), LEFT)
                continue
            else:
                began = {"node": "n0", "ranks": [0], "time": time.time() - 61}
                write_json(crashing.node_ranks(3, 0), began)
        pause_s, _ = pauses_of(crashing, attempt, capsys)
        assert pause_s == (30 if attempt == 2 else 0)


def test_a_requeued_job_waits_in_the_queue_and_one_that_is_not_in_its_allocation(
    crashing, monkeypatch
):
    for attempt in range(3):
        crashing.begin_attempt()
        if attempt < 2:
            note = {"attempt": attempt, "update": -1, "raised": None}
            write_json(crashing.departure(attempt), {"why": "x", "time": 0.0, "failed": note})
    commands, waits = [], []

    def answer(_, *command, **__):
        commands.append(command)
        return Answer(0, "" if command[0] == "scontrol" else queue_line(JobArrayID="77"), "")

    monkeypatch.setattr(SlurmClient, "run", answer)
    monkeypatch.setattr("time.sleep", waits.append)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    ended(crashing, 2, "failed", culprit=BEYOND)
    assert finalize_in_job(crashing.path, 2, 1, "") is Next.REQUEUE
    update = ("scontrol", "update", "JobId=77", "StartTime=now+30")
    assert [c for c in commands if c[0] == "scontrol"] == [("scontrol", "requeue", "77"), update]
    assert waits == []
    _count_new_srun(crashing, pause_s=30.0)
    assert sum(waits) == 30
    _count_new_srun(crashing, pause_s=30.0, is_stopped=lambda: len(waits) == 35)
    assert len(waits) == 35, "a stop ends the pause"
    waits[30:] = []
    crashing.cancel.touch()
    _count_new_srun(crashing, pause_s=30.0)
    assert sum(waits) == 30


def test_an_attempt_that_left_in_order_is_handed_back_with_its_reason(run):
    assert concluded(run, attempts(run, 1)) == (True, 1, None)
    assert read_json(run.decision(0)) == {**LEFT, "kind": "requeue"}


@pytest.mark.parametrize(
    ("starts", "progress_at", "update_of", "goes_on"),
    [
        (FRUITLESS, None, None, True),
        (FRUITLESS + 1, None, None, False),
        (FRUITLESS + 1, 1, None, False),  # progress before the ten
        (FRUITLESS + 1, 2, None, True),
        (FRUITLESS + 1, FRUITLESS, None, True),
        (FRUITLESS + 1, None, 0, False),
        (FRUITLESS + 1, None, 1, True),  # although no checkpoint holds it
    ],
)
def test_ten_starts_without_an_update_end_the_run(run, starts, progress_at, update_of, goes_on):
    begun = [4 if progress_at is None or number < progress_at else 5 for number in range(starts)]
    last = attempts(run, starts, resumed_from=begun)
    if update_of is not None:
        run.metrics.write_text(json.dumps(record(7, attempt=update_of)) + "\n")
    again, handed_back, end = concluded(run, last)
    assert (again, handed_back, FRUITLESS) == (goes_on, int(goes_on), 10)
    if not goes_on:
        assert (end["state"], end["culprit"]["node"]) == ("failed", "batch")
        remedies = "cluster.time_min cluster.signal_ahead_s accumulation.steps"
        assert mentions(end["culprit"]["cause"], f"10 update {remedies}"), end["culprit"]["cause"]


@pytest.mark.parametrize(
    ("state", "departure", "stopped"),
    [(None, LEFT, True), ("stopped", None, True), ("failed", None, False)],
)
def test_a_cancelled_run_ends_as_stopped_unless_it_failed(run, state, departure, stopped):
    attempts(run, 1)
    run.cancel.touch()
    if state:
        ended(run, 0, state)
    again, handed_back, end = concluded(run, 0, departure=departure)
    assert (again, handed_back) == (False, 0)
    assert end["state"] == ("stopped" if stopped else "failed")


@pytest.mark.parametrize(("began", "state"), [(False, "stopped"), (True, "failed")])
def test_a_cancelled_run_that_is_allocated_again_starts_nothing_and_is_stopped(run, began, state):
    attempts(run, 2)
    run.cancel.touch()
    if began:
        write_json(run.node_ranks(1, 0), {"node": "n0", "ranks": [0]})
    again, _, end = concluded(run, 1, departure=None)
    assert (again, end["state"]) == (False, state)


@pytest.mark.parametrize("state", ["stopped", "failed"])
@pytest.mark.parametrize("departure", [LEFT, None])
def test_a_job_that_may_not_be_requeued_is_stopped_or_fails_by_its_culprit(run, departure, state):
    attempts(run, 1)
    configure(run, run={"max_restarts": 5})
    ended(run, 0, state)
    job = ScheduledJob(id="77", state="RUNNING", requeue=False)
    again, handed_back, end = concluded(run, 0, job=job, departure=departure)
    assert (again, handed_back, end["state"]) == (False, 0, state)
    if departure and state == "stopped":  # the site has cleared Requeue
        assert end["why"] == f"{LEFT['why']}; {NOT_REQUEUED}"
    if state == "failed":
        assert (end["culprit"]["rank"], end["culprit"]["cause"]) == (3, BEYOND.cause)
        assert end["culprit"]["remark"] == (NOT_REQUEUED if departure else "")


@pytest.mark.parametrize(("first", "goes_on"), [(None, False), (0, False), (2, True)])
def test_a_failure_is_handed_back_as_often_as_is_allowed_since_a_person_asked(run, first, goes_on):
    configure(run, run={"max_restarts": 2})
    attempts(run, 3)
    if first is not None:
        write_json(run.handle, {"job_id": "7", "attempt": first})
    for earlier in (0, 1):
        failed = {"attempt": earlier, "update": -1, "raised": None}
        write_json(run.departure(earlier), {"why": "x", "updates": None, "failed": failed})
    again, handed_back, end = concluded(run, 2, departure=None)
    assert (again, handed_back, end is None) == (goes_on, int(goes_on), goes_on)
    if not goes_on:
        assert mentions(end["culprit"]["remark"], "2 times run.max_restarts=2")


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (ScheduledJob(id="77", state="RUNNING", preempted_at=5.0), "preempted"),
        (ScheduledJob(id="77", state="RUNNING", reason="TimeLimit"), "near its time limit"),
        (ScheduledJob(id="77", state="RUNNING", reason="NodeFail"), None),
        (
            ScheduledJob(id="77", state="RUNNING", ends_at=1600.0 + MARGIN_S - 1),
            "near its time limit",
        ),
        (ScheduledJob(id="77", state="SIGNALING", ends_at=1600.0), "near its time limit"),
        (ScheduledJob(id="77", state="RUNNING", ends_at=1600.0 + MARGIN_S), None),
        (ScheduledJob(id="77", state="RUNNING"), None),
        (ScheduledJob(id="77", state="FAILED", ends_at=990.0), None),  # that is when it ended
    ],
)
def test_the_schedulers_reason_replaces_the_ranks_where_it_shows(run, monkeypatch, job, why):
    monkeypatch.setattr("time.time", lambda: 1000.0)
    configure(run, cluster={"signal_ahead_s": 600})
    attempts(run, 1)
    concluded(run, 0, job=job)
    assert read_json(run.decision(0)) == {**LEFT, "why": why or LEFT["why"], "kind": "requeue"}


def test_the_schedulers_reason_does_not_replace_that_of_a_silent_node(run):
    attempts(run, 1)
    ended(run, 0, "failed", lost="node n7 stopped answering")
    concluded(run, 0, job=ScheduledJob(id="77", state="RUNNING", preempted_at=5.0))
    assert read_json(run.decision(0)) == {**LEFT, "kind": "requeue"}


@pytest.mark.parametrize(
    ("code", "sent", "said", "why"),
    [
        (143, "TERM", "", "its batch script was sent SIGTERM"),
        (143, "", "", "stopped before it began"),
        (KILLED, "USR1", "", "its batch script was sent SIGUSR1"),
        (KILLED, "", "", SRUN_KILLED),
        (
            KILLED,
            "",
            "srun: forcing job termination\nsrun: error: n1: tasks 0-1: Killed\n",
            SRUN_ENDED,
        ),
        (
            KILLED,
            "",
            "srun: Job step aborted: Waiting\nsrun: error: n1: task 1: Killed\n",
            SRUN_ENDED,
        ),  # scancel JOB.0
        (KILLED, "", "srun: error: n1: task 1: Killed\n", None),
        (KILLED, "", f"{KILLED_TASK}srun: error: n1: task 1: Killed\n", AGENTS_KILLED),
        (KILLED, "", f"{MISSING} 1\nsrun: error: n0: task 0: Killed\n", failure_of("n1")),
        (1, "", f"{MISSING} 3\n", failure_of("3")),
        (1, "", "srun: error: Cannot communicate with node 1.  Aborting job.\n", failure_of("n1")),
        (KILLED, "TERM", "srun: error: Node failure on n2\n", failure_of("n2")),
        (1, "TERM", "", None),
        (0, "", "", None),
    ],
)
def test_an_attempt_was_cut_short_where_srun_was_stopped_or_killed(run, code, sent, said, why):
    attempts(run, 1)
    for index in range(2):
        write_json(run.node_ranks(0, index), {"node": f"n{index}", "ranks": [index]})
    run.srun_log(0).write_text(said)
    assert why_cut_short(run, 0, code, sent) == why
    write_failure(run, 0, secondary=True)  # which only saw the others end
    assert why_cut_short(run, 0, code, sent) == why
    write_failure(run, 0)
    assert why_cut_short(run, 0, code, sent) is None


@pytest.mark.parametrize(
    ("code", "sent", "lost"), [(KILLED, "", True), (KILLED, "USR1", False), (143, "", False)]
)
def test_a_loss_is_told_from_a_stop(run, code, sent, lost):
    attempts(run, 1)
    assert _cut_short(run, 0, code, sent).get("lost", False) is lost


@pytest.mark.parametrize("lost", [None, "node n1 stopped answering"])
def test_where_there_is_an_outcome_it_says_what_was_lost(run, lost):
    attempts(run, 1)
    ended(run, 0, "failed", lost=lost)
    assert why_cut_short(run, 0, KILLED, "TERM") == lost


def test_the_node_that_srun_missed_is_the_cause_of_the_loss_of_the_others(run):
    attempts(run, 1)
    lost = Culprit(rank=None, node="n1", cause="the node went away: its agent is gone")
    ended(run, 0, "failed", culprit=lost, lost="node n1 stopped answering")
    write_json(run.node_ranks(0, 0), {"node": "n0", "ranks": [0]})
    run.srun_log(0).write_text(f"{MISSING} 0\nsrun: Job step aborted: Waiting up to 5 seconds\n")
    assert why_cut_short(run, 0, KILLED, "") == failure_of("n0")


def test_a_node_that_agents_and_srun_both_miss_is_the_cause_itself(run):
    attempts(run, 1)
    lost = Culprit(rank=None, node="n1", cause="the node went away: its agent is gone")
    ended(run, 0, "failed", culprit=lost, lost="node n1 stopped answering")
    run.srun_log(0).write_text(f"{MISSING} 1\nsrun: Job step aborted: Waiting up to 5 seconds\n")
    assert why_cut_short(run, 0, KILLED, "", "n[0-1]") == "node n1 stopped answering"
    assert why_cut_short(run, 0, KILLED, "", "n[2-3]") == failure_of("n3")


def test_a_node_that_failed_before_its_agent_began_is_named_by_the_jobs_list(run):
    attempts(run, 1)
    run.srun_log(0).write_text(f"{MISSING} 1\n")
    assert why_cut_short(run, 0, KILLED, "", "n[3,7-9]") == failure_of("n7")
    assert why_cut_short(run, 0, KILLED, "", "n3") == failure_of("1")


@pytest.mark.parametrize("program", [True, False])
def test_a_program_whose_workers_all_finished_has_finished(run, program):
    attempts(run, 1)
    configure(run, job={"command": ["true"]} if program else {"_target_": "a.B"})
    ended(run, 0, "finished")
    end = concluded(run, 0, departure=None)[2]
    assert end["state"] == ("finished" if program else "failed")


def test_ranks_that_all_ended_in_order_without_a_result_have_no_culprit(run):
    attempts(run, 1)
    ended(run, 0, "finished")
    in_order = culprit_of(run, 0, 0)
    assert (in_order.rank, in_order.node) == (None, "batch")
    assert in_order.cause == NO_RESULT
    ended(run, 0, "failed", culprit=BEYOND)
    assert culprit_of(run, 0, 5) == BEYOND


def test_srun_that_starts_again_in_a_job_renews_no_allowance_of_restarts(run, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    write_json(run.handle, {"kind": "slurm", "job_id": "77", "attempt": 0, "slurm_conf": None})
    configure(run, run={"max_restarts": 1})
    attempts(run, 3)
    assert concluded(run, 0, departure=None)[0]
    _count_new_srun(run)  # srun alone was killed in attempt 1
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "70")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "7")
    _count_new_srun(run)
    assert run.srun_restarts("70_7").exists(), "an element is named as squeue names it"
    again, _, end = concluded(run, 2, departure=None)
    assert not again
    assert mentions(end["culprit"]["remark"], "1 time run.max_restarts=1")
    assert run.srun_restarts("77").read_text() == "1\n"


@pytest.fixture
def usable(run, monkeypatch):
    """Return whether attempt 0 of job 77 may be followed by another one in its allocation."""

    def call(attempt=0, *, code=1, job=JOB, listens=False, daemons_listen=False):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            spec = node_spec(run.path, attempt=attempt)
            publish_agent(spec, listener.getsockname()[1])
            if listens:
                return _is_usable(run, attempt, job, code)
        return _is_usable(run, attempt, job, code, lambda: daemons_listen)

    attempts(run, 1)
    return call


def test_an_allocation_is_used_again_unless_its_nodes_are_wanted_or_suspect(run, usable):
    assert usable()
    assert not usable(listens=True)  # it may hang
    assert not usable(job=replace(JOB, preempted_at=5.0))
    assert not usable(job=replace(JOB, state="COMPLETING"))
    ended(run, 0, "failed", lost="node n1 stopped answering")
    assert usable()
    run.finalizing(0).write_text("sent srun SIGTERM\n")
    assert not usable()
    assert usable(daemons_listen=True)
    run.finalizing(0).write_text("")
    ended(run, 0, "failed", culprit=BEYOND, lost="rank 3 on n1 was stopped")
    assert not usable()
    ended(run, 0, "failed", culprit=BEYOND)
    assert usable()
    run.srun_log(0).write_text("srun: error: Task launch for StepId=7.1 failed on node n1: refused")
    assert why_cut_short(run, 0, 1, "") is None
    assert not usable()
    assert usable(daemons_listen=True)  # then a process of the step has failed, no node
    run.outcome(0).unlink()
    assert why_cut_short(run, 0, 1, "") == failure_of("n1")


class Nodes:
    """Answers of scontrol about two nodes."""

    def __init__(self, ports):
        self.ports = ports

    def check_output(self, *command):
        assert command[-1] == "n[0-1]"
        own = f"NodeAddr=127.0.0.1 NodeHostName=h Port={self.ports[0]} State=MIXED"
        usual = "NodeAddr=127.0.0.1 NodeHostName=h State=MIXED"
        return f"*** maintenance on Monday ***\nNodeName=n0 {own}\nNodeName=n1 {usual}\n"

    def settings(self):
        return {"SlurmdPort": str(self.ports[1])}


def test_the_daemons_of_nodes_are_asked_at_their_own_or_the_usual_port():
    with socket.create_server(("127.0.0.1", 0)) as first:
        with socket.create_server(("127.0.0.1", 0)) as second:
            nodes = Nodes([listener.getsockname()[1] for listener in (first, second)])
            assert _daemons_listen(nodes, "n[0-1]")
        assert not _daemons_listen(nodes, "n[0-1]")


def test_an_srun_that_could_start_no_agent_is_not_tried_again_in_place(run):
    attempts(run, 1)
    assert not _is_usable(run, 0, JOB, 1)
    assert _is_usable(run, 0, JOB, KILLED)
    assert why_cut_short(run, 0, 1, "") is None
    write_json(run.handle, {"kind": "slurm", "job_id": "77", "attempt": 0, "slurm_conf": None})
    run.srun_restarts("77").write_text("1\n")  # it could, in this allocation
    assert why_cut_short(run, 0, 1, "") == SRUN_FAILED


@pytest.mark.parametrize("program", [True, False])
def test_an_srun_that_is_killed_again_and_again_is_tried_elsewhere_and_ends(run, program):
    configure(run, job={"command": ["true"]} if program else {"_target_": "a.B"})
    departure = departure_note(SRUN_KILLED, lost=True)
    usable = []
    for attempt in range(FRUITLESS):
        run.begin_attempt()
        usable.append(_is_usable(run, attempt, JOB, KILLED))
        again, _, end = concluded(run, attempt, departure=departure)
        assert again == (attempt < FRUITLESS - 1)
    assert usable == [True, True] + [False] * 8
    kept = replace(JOB, requeue=False)  # the site has cleared it, so this allocation is all
    assert _is_usable(run, attempt, kept, KILLED)
    assert mentions(end["culprit"]["cause"], f"10 {SRUN_KILLED} {run.srun_log(attempt)}")


@pytest.mark.parametrize("program", [True, False])
def test_a_node_that_stops_answering_again_and_again_ends_the_run_with_that_cause(run, program):
    configure(run, job={"command": ["true"]} if program else {"_target_": "a.B"})
    culprit = Culprit(rank=None, node="n1", cause="its agent is gone").to_json()
    lost = "node n1 stopped answering"
    for attempt in range(FRUITLESS):
        run.begin_attempt()
        outcome = {"state": "failed", "lost": lost, "culprit": {**culprit, "usage": False}}
        write_json(run.outcome(attempt), outcome)
        departure = _cut_short(run, attempt, 1, "")
        assert departure["why"] == lost
        again, _, end = concluded(run, attempt, departure=departure)
        assert again == (attempt < FRUITLESS - 1)
    assert mentions(end["culprit"]["cause"], f"10 {lost} {run.srun_log(attempt)}")


def test_a_job_that_is_not_requeued_goes_on_in_its_allocation_or_fails(run):
    attempts(run, 1)
    job, departure = replace(JOB, requeue=False), departure_note(SRUN_KILLED, lost=True)
    assert concluded(run, 0, job=job, departure=departure, in_place=True)[:2] == (True, 1)
    again, _, end = concluded(run, 0, job=job, departure=departure)
    assert (again, end["state"]) == (False, "failed")
    run.result.unlink()
    run.decision(0).unlink()
    stop = departure_note("its batch script was sent SIGTERM")  # before it began
    assert concluded(run, 0, job=job, departure=stop)[2]["state"] == "stopped"


def test_a_program_that_ran_for_some_time_may_lose_its_srun_again(run):
    configure(run, job={"command": ["true"]})
    attempts(run, FRUITLESS + 2)
    write_json(run.node_ranks(5, 0), {"node": "n0", "ranks": [0], "time": 100.0})
    write_json(run.departure(5), {"why": SRUN_KILLED, "updates": None, "time": 161.0})
    departure = departure_note(SRUN_KILLED, lost=True)
    assert concluded(run, FRUITLESS + 1, departure=departure)[0]


def job_status(**values):
    return Answer(0, queue_line(JobArrayID="77", **values), "")


@pytest.fixture
def finalized(run, monkeypatch):
    """Finishes attempt 0 of job 77: (its end, what scontrol was asked, the pauses).

    The answers to squeue are recorded ones, the last for ever. tests/slurm asks a real scheduler.
    """

    def call(*answers, code=143, sent="TERM", restarts=None, unanswered=0):
        left, asked, pauses, this_test = list(answers), [], [], threading.get_ident()

        def answer(_, *command, **__):
            if threading.get_ident() != this_test:  # an earlier test's follower still asks
                raise SchedulerDown("it is not that one's scheduler")
            if command[0] == "squeue":
                assert command[command.index("-j") + 1] == "77"
                return left.pop(0) if len(left) > 1 else left[0]
            asked.append(command)
            if len(asked) <= unanswered:
                raise SchedulerDown("scontrol did not answer within 60 s")
            return Answer(0, "", "")

        monkeypatch.setattr(SlurmClient, "run", answer)
        monkeypatch.setattr("time.sleep", pauses.append)
        monkeypatch.setenv("SLURM_JOB_ID", "77")
        monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
        if restarts is not None:
            monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        finalize_in_job(run.path, 0, code, sent)
        return run.read_result(), asked, pauses

    attempts(run, 1)
    return call


REQUEUED = [("scontrol", "requeue", "77")]


def test_a_job_that_was_told_to_stop_is_handed_back_and_notes_why(run, finalized):
    assert finalized(job_status()) == (None, REQUEUED, [])
    noted = read_json(run.decision(0))
    assert (mentions(noted["why"], "SIGTERM"), noted["updates"]) == (True, None)
    assert noted["time"] > 0


def test_what_the_ranks_noted_of_their_leaving_stands(run, finalized):
    write_json(run.departure(0), LEFT)
    assert finalized(job_status(), code=1, sent="") == (None, REQUEUED, [])
    assert read_json(run.departure(0)) == LEFT
    assert read_json(run.decision(0)) == {**LEFT, "kind": "requeue"}


def test_a_job_that_was_requeued_meanwhile_is_left_alone_and_its_reason_noted(run, finalized):
    write_json(run.departure(0), LEFT)
    taken_back = job_status(State="COMPLETING", RestartCnt="1")
    assert finalized(taken_back) == (None, [], [])
    assert read_json(run.decision(0))["why"] == REQUEUED_BY_OTHERS


@pytest.mark.parametrize(
    ("values", "restarts", "asked"),
    [
        ({"State": "PENDING"}, None, []),
        ({"State": "COMPLETED"}, None, []),
        ({"RestartCnt": "1"}, None, []),
        ({"RestartCnt": "1"}, "2", []),
        ({"RestartCnt": "1", "State": "CANCELLED"}, "0", []),
        (None, None, []),
        ({"State": "COMPLETING", "Reason": "TimeLimit"}, None, REQUEUED),
        ({"RestartCnt": "2"}, "2", REQUEUED),
        ({"State": "SIGNALING"}, None, REQUEUED),
        ({"State": "SUSPENDED"}, None, REQUEUED),
        ({"State": "REQUEUE_HOLD"}, None, []),
    ],
)
def test_a_job_is_handed_back_unless_it_was_taken_back(run, finalized, values, restarts, asked):
    gone = Answer(1, "", "slurm_load_jobs error: Invalid job id specified")
    answer = gone if values is None else job_status(**values)
    assert finalized(answer, restarts=restarts) == (None, asked, [])
    assert (read_json(run.decision(0)) is None) == (not asked)


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING"])
def test_a_job_that_a_person_cancelled_through_the_scheduler_is_stopped(finalized, state):
    end, asked, _ = finalized(job_status(State=state))
    assert (end["state"], asked) == ("stopped", [])
    assert (end["culprit"]["node"], end["culprit"]["cause"]) == ("scheduler", CAUSES["CANCELLED"])
    assert end["culprit"]["rank"] is None


def test_an_attempt_with_a_newer_one_or_an_end_is_not_finalized(run, finalized):
    run.newest_attempt.write_text("1")
    assert finalized(job_status()) == (None, [], [])
    run.newest_attempt.write_text("0")
    write_json(run.result, {"state": "finished", "updates": 4})
    assert finalized(job_status())[0]["state"] == "finished"


def test_while_the_scheduler_does_not_answer_it_is_asked_again_ever_more_seldom(finalized, capsys):
    down = Answer(1, "", "slurm_load_jobs error: Unable to contact slurm controller")
    _, asked, pauses = finalized(*[down] * 7, job_status())
    assert (asked, pauses) == (REQUEUED, [1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0])
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 7
    assert "slurm_load_jobs error: Unable to contact slurm controller" in said[1]


def answer_as_agent(listener, run, *, index):
    """Answer the first probe that asks whether the agent lives, as that does."""
    listener.settimeout(20)
    while True:
        with listener.accept()[0] as link:
            link.settimeout(20)
            if line := link.recv(1000):  # the probe before only looked whether the port is open
                secret = secret_of(run, 0)
                assert authenticate(json.loads(line), secret=secret, me=(0, index)) == index
                link.sendall(ANSWER)
                return


def test_an_agent_is_waited_for_although_that_of_an_earlier_node_published_nothing(run):
    run.begin_attempt()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        publish_agent(node_spec(run.path, index=1), listener.getsockname()[1])
        waiting = threading.Thread(target=_await_agents, args=(run, 0), daemon=True)
        waiting.start()
        answer_as_agent(listener, run, index=1)
        assert waiting.is_alive()
    waiting.join(20)
    assert not waiting.is_alive()


@pytest.mark.parametrize("answers", [True, False])
def test_a_port_of_an_ended_agent_that_another_process_has_is_not_waited_for(run, capsys, answers):
    """The nodes would be held until the time limit of the job."""
    if not answers:
        configure(run, cluster={"hang_timeout_s": 2 * (REACH_S + POLL_S)})
    run.begin_attempt()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        publish_agent(node_spec(run.path, index=1), port)
        waiting = threading.Thread(target=_await_agents, args=(run, 0), daemon=True)
        waiting.start()
        listener.settimeout(0.1)
        deadline = time.monotonic() + 60
        while answers and waiting.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                listener.accept()[0].close()  # as the agent of another run does
        waiting.join(60)
        assert not waiting.is_alive()
    [note] = capsys.readouterr().out.splitlines()
    assert f"{port} of node 1 (127.0.0.1)" in note
    assert ("another process" in note) == answers
    assert ("cluster.hang_timeout_s" in note) != answers


def test_an_agent_that_does_not_answer_once_is_waited_for(run, monkeypatch):
    # On a slow machine more probes may be over before the test goes on.
    monkeypatch.setattr("orchestrator.clusters.slurm.finalize.SILENT_PROBES", 1000)
    run.begin_attempt()
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        first = socket.create_connection(address)  # none further is answered before it is accepted
        publish_agent(node_spec(run.path, index=1), address[1])
        waiting = threading.Thread(target=_await_agents, args=(run, 0), daemon=True)
        waiting.start()
        waiting.join(REACH_S + POLL_S)  # one probe
        assert waiting.is_alive()
        listener.settimeout(20)
        listener.accept()[0].close()  # that one
        first.close()
        answer_as_agent(listener, run, index=1)
        assert waiting.is_alive()
    waiting.join(20)
    assert not waiting.is_alive()


def test_a_scheduler_whose_answer_cannot_be_read_is_not_asked_without_end(finalized, monkeypatch):
    monkeypatch.setattr("time.monotonic", iter(range(0, 10**6, 100)).__next__)
    with refused(ClusterError, "squeue *** Welcome ***"):
        finalized(Answer(0, "*** Welcome ***", ""))


@pytest.mark.parametrize(
    ("later", "calls"),
    [({}, 3), ({"State": "COMPLETING"}, 1), ({"State": "PENDING"}, 1), ({"RestartCnt": "1"}, 1)],
    ids=["it was not accepted", "it ends", "it is queued", "it has begun again"],
)
def test_a_requeue_with_a_lost_answer_is_repeated_unless_it_was_accepted(finalized, later, calls):
    _, asked, pauses = finalized(job_status(), job_status(**later), unanswered=2)
    assert (asked, pauses) == (REQUEUED * calls, [1.0, 2.0][: max(1, calls - 1)])


class Ending:
    """The end of attempt 2 of job 77, on a clock of its own, with a disk that is full once.

    Attributes:
        writes: how many files were written, the failed one included.
        now: the time; each pause of the program advances it.
    """

    def __init__(self, folder, monkeypatch, *, requeue, full_at=None):
        self.run, self.commands, self.writes, self.now = make_run(folder), [], 0, 1000.0
        self._requeue, self._full_at, self._monkeypatch = requeue, full_at, monkeypatch
        configure(
            self.run,
            job={"command": ["false"]},
            run={"max_restarts": 0},
            cluster={"signal_ahead_s": 60},
        )
        for attempt in range(3):
            self.run.begin_attempt()
            began = 990.0 if attempt == 2 else 900.0
            write_json(self.run.node_ranks(attempt, 0), {"node": "n0", "ranks": [0], "time": began})
            if attempt < 2:
                failed = {"attempt": attempt, "update": -1, "raised": None}
                note = {"why": "x", "time": 950.0, "failed": failed, "kind": "new srun"}
                write_json(self.run.decision(attempt), note)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            spec = node_spec(self.run.path, attempt=2)
            publish_agent(spec, listener.getsockname()[1])

    def _answer(self, *command, **_):
        if command[0] == "squeue":
            line = queue_line(JobArrayID="77", Requeue=str(int(self._requeue)))
            return Answer(0, line, "")
        self.commands.append(command)
        return Answer(0, "", "")

    def _sleep(self, seconds):
        self.now += seconds

    def _sync(self, _):
        self.writes += 1
        if self.writes == self._full_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def finalize(self):
        """Return what follows; by the real function, which repeats itself on a full disk."""
        with self._monkeypatch.context() as patch:
            patch.setattr(SlurmClient, "run", self._answer)
            patch.setattr("time.sleep", self._sleep)
            patch.setattr("time.time", lambda: self.now)
            patch.setattr("os.fsync", self._sync)
            patch.setenv("SLURM_JOB_ID", "77")
            patch.delenv("SLURM_RESTART_COUNT", raising=False)
            return finalize_patiently(lambda: finalize_in_job(self.run.path, 2, KILLED, ""))

    def left(self):
        """What the end has left: the names of all files, and the records, without their times."""
        names = sorted(str(path.relative_to(self.run.path)) for path in self.run.path.rglob("*"))
        decision = read_json(self.run.decision(2)) or {}
        began = decision.pop("time", None)
        if "pause" in decision:
            decision["pause"]["until"] -= began
        counted = self.run.srun_restarts("77")
        count = counted.read_text() if counted.exists() else None
        departure = read_json(self.run.departure(2))
        return names, decision, departure, count, self.run.read_result(), self.commands


def lose_a_node(run):
    ended(run, 2, "failed", lost="node n1 stopped answering")


def fail_again(run):
    configure(run, run={"max_restarts": 100})
    ended(run, 2, "failed", culprit=BEYOND)


def leave_in_order(run):
    write_json(run.departure(2), LEFT)


def fail_for_good(run):
    ended(run, 2, "failed", culprit=BEYOND)


@pytest.mark.parametrize(
    ("end", "requeue", "follows", "writes", "pause_s"),
    [
        (lose_a_node, False, Next.NEW_SRUN, 2, 0.0),
        (fail_again, False, Next.NEW_SRUN, 2, 30.0),
        (fail_again, True, Next.REQUEUE, 1, 0.0),  # it waits in the queue
        (leave_in_order, True, Next.REQUEUE, 1, 0.0),
        (fail_for_good, True, Next.END, 1, 0.0),
    ],
)
def test_a_finalization_that_a_full_disk_interrupts_is_repeated_to_the_same_result(
    tmp_path, monkeypatch, end, requeue, follows, writes, pause_s
):
    undisturbed = Ending(tmp_path / "undisturbed", monkeypatch, requeue=requeue)
    end(undisturbed.run)
    assert undisturbed.finalize() is follows
    assert (undisturbed.writes, undisturbed.now) == (writes, 1000.0 + pause_s)
    for full_at in range(1, writes + 1):
        ending = Ending(tmp_path / f"{full_at}", monkeypatch, requeue=requeue, full_at=full_at)
        end(ending.run)
        assert ending.finalize() is follows
        assert ending.writes == writes + 1
        assert ending.left() == undisturbed.left()
        assert ending.now == undisturbed.now + DISK_POLL_S, "the pause is no longer"


def test_an_ended_job_carries_out_a_restart_that_its_script_could_only_record(run):
    """It cannot start srun any more, so it is requeued; a cancelled run is stopped."""
    attempts(run, FRUITLESS + 1)
    note = {"why": "x", "failed": {"attempt": FRUITLESS, "update": -1, "raised": None}}
    write_json(run.decision(FRUITLESS), {**note, "kind": "new srun"})
    ended(run, FRUITLESS, "failed", culprit=BEYOND)
    assert concluded(run, FRUITLESS, departure=None) == (True, 1, None)
    assert read_json(run.decision(FRUITLESS)) == {**note, "kind": "requeue"}
    assert concluded(run, FRUITLESS, departure=None) == (True, 1, None)
    run.cancel.touch()
    again, handed_back, end = concluded(run, FRUITLESS, departure=None)
    assert (again, handed_back, end["state"]) == (False, 0, "stopped")


@pytest.mark.parametrize(
    ("values", "script_gone", "follows"),
    [
        ({"Reason": "TimeLimit"}, "", Next.NEW_SRUN),  # which it was not when that was decided
        ({}, "its batch script was killed", Next.REQUEUE),
        ({"State": "COMPLETING", "Reason": "TimeLimit"}, "", Next.REQUEUE),
    ],
)
def test_a_recorded_new_srun_follows_where_srun_can_still_be_run(
    run, monkeypatch, values, script_gone, follows
):
    attempts(run, 1)
    note = departure_note("node n1 failed", lost=True)
    write_json(run.decision(0), {**note, "kind": "new srun"})
    commands = []

    def answer(_, *command, **__):
        if command[0] == "squeue":
            return job_status(**values)
        commands.append(command)
        return Answer(0, "", "")

    monkeypatch.setattr(SlurmClient, "run", answer)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    assert finalize_in_job(run.path, 0, 1, "", script_gone=script_gone) is follows
    assert read_json(run.decision(0)) == {**note, "kind": follows.value}
    assert commands == (REQUEUED if follows is Next.REQUEUE else [])
    assert run.srun_restarts("77").exists() == (follows is Next.NEW_SRUN)
