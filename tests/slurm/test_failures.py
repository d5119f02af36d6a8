"""A rank that fails ends the job as FAILED at once, by name, and leaves nothing behind."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.helpers import TINY, until
from tests.slurm import runs

FAULTS = {
    "raise": "ValueError: the tiny job was told to fail [here]",
    "kill": "killed by signal 9 (SIGKILL)",
    "memory": "out of memory: MemoryError",
    "leave": "exited with code 0 before its training had ended",
}


SOON = "cluster.heartbeat_timeout_s=4"
ALONE = "cluster.ranks_per_node=1"
# act, in which ranks, settings -> the culprit's rank (None: any), its cause, a line of its stack
STILL = {
    "every rank leaves": ("exit0", "all", (), None, FAULTS["leave"], ""),
    "a one-node job's first rank is stopped": (
        "stop", 0, (SOON,), 0, "it was frozen (SIGSTOP) for 4 s", ""),
    "all ranks of a node are stopped": (
        "stop", "all", (SOON,), None, "it was frozen (SIGSTOP) for 4 s", ""),
    "a job's only rank is stopped": (
        "stop", 0, (SOON, ALONE), 0, "it was frozen (SIGSTOP) for 4 s", ""),
    "a job's only rank holds the interpreter": (
        "interpreter", 0, (SOON, ALONE), 0, "it gave no sign of life for 4 s", "in loss"),
    "a rank stands still, and the other gives up": (
        "sleep", 1, (SOON, "cluster.collective_timeout_s=10"), 1,
        "the others waited in vain: it was still at micro-step", "in loss"),
}  # fmt: skip


def words_only(name):
    return re.sub(r"\W+", "-", name)


@pytest.fixture(scope="module", autouse=True)
def limited(slurm, tmp_path_factory):
    """A run that takes longer than its time limit; the other tests run meanwhile."""
    run = tmp_path_factory.mktemp("limited") / "run"
    runs.submit(
        slurm, run, "train.updates=60", "job.pause_s=0.25", "train.checkpoint_every=1000",
        "cluster.partition=short", "cluster.time_min=1", "cluster.signal_ahead_s=1",
    )  # fmt: skip
    return run


@pytest.fixture(scope="module")
def failing(slurm, tmp_path_factory):
    """All at once: they do not touch each other."""
    folder = tmp_path_factory.mktemp("failing")
    for fault in FAULTS:
        runs.submit(
            slurm, folder / fault, f"job.fault={fault}", "job.fault_rank=3", "train.updates=30",
            "cluster.ranks_per_node=2", "job.pause_s=0.02",
        )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def standing(slurm, tmp_path_factory):
    """All at once, when those are over whose end is timed: starts take the processors."""
    folder = tmp_path_factory.mktemp("standing")
    for name, (act, ranks, more, *_) in STILL.items():
        runs.submit(
            slurm, folder / words_only(name), "job._target_=tests.light_job.Lively",
            f"+job.act={act}", f"+job.ranks={ranks}", "train.updates=999", "train.evaluate_every=0",
            "cluster.nodes=1", "cluster.ranks_per_node=2", "cluster.requeue=false", *more,
        )  # fmt: skip
    return folder


KILLED = ("train.updates=4", "train.checkpoint_every=1", "run.survive=false")
"""So each attempt does two of them."""


@pytest.fixture(scope="module")
def untimed(slurm, tmp_path_factory):
    """Runs that fail in other ways, all at once, when those are over, too."""
    folder = tmp_path_factory.mktemp("untimed")
    for name, more in {
        "killed": (TINY, *KILLED, "job.fault=kill", "job.fault_after=9", "run.max_restarts=1"),
        "resumed": ("job.fault=raise", "job.fault_rank=1", "train.checkpoint_every=1",
                    "train.updates=12", "job.fault_after=20"),
        "early": ("job.samples=nonsense", "train.updates=1"),
    }.items():  # fmt: skip
        runs.submit(slurm, folder / name, *more)
    return folder


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_rank_fails_the_job_within_ten_seconds(slurm, failing, fault):
    run = failing / fault
    job = runs.job_of(run)
    until((run / "metrics.jsonl").exists, 90, "the first update")
    ended = runs.wait_over(slurm, run)
    state = runs.accounted(slurm, job)
    end = int(slurm.command(
        "env", "SLURM_TIME_FORMAT=%s", "sacct", "-nPX", "-j", job, "-o", "End"
    ).strip())  # fmt: skip
    # The fault comes in the second window, so within moments of the first one's record.
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["time"]
    assert end - last < 10
    assert state == "FAILED"
    culprit = ended["culprit"]
    assert (ended["state"], culprit["rank"]) == ("failed", 3)
    assert culprit["cause"].startswith(FAULTS[fault])
    assert culprit["node"] in slurm.node_names
    # The scheduler's answer of a moment ago may do for a question of now.
    found = until(lambda: (told := runs.status(run))["state"] != "ending" and told, 10, "its end")
    assert (found["state"], found["reason"]) == ("failed", culprit["cause"])
    until(lambda: not runs.processes_of_job(slurm, job), 5, "the end of every process")


@pytest.mark.parametrize("name", STILL)
def test_who_left_without_a_word_or_stands_still_is_the_culprit(slurm, standing, name):
    *_, rank, cause, line = STILL[name]
    run = standing / words_only(name)
    ended = runs.wait_over(slurm, run)
    assert ended["state"] == "failed"
    culprit = ended["culprit"]
    assert rank in (None, culprit["rank"])
    assert culprit["cause"].startswith(cause)
    assert line in "\n".join(culprit["log_tail"])
    # The controller says that a job is over before its last step daemon has collected its task.
    job = runs.job_of(run)
    until(lambda: not runs.processes_of_job(slurm, job), 5, "the end of every process")


def test_code_that_is_not_what_was_submitted_fails_the_job_by_its_name(slurm, tmp_path):
    run = tmp_path / "run"
    runs.submit(slurm, run, "+cluster.slurm_flags.begin=now+3600")
    archive = run / "code" / "000.tar"
    os.truncate(archive, 3000)
    runs.release(slurm, run)
    until(lambda: runs.over(slurm, runs.job_of(run)), 60, "the end of the job")
    found = runs.status(run)
    assert found["state"] == "failed"
    assert found["reason"].startswith(f"the code in {archive} is damaged: ")


def test_a_failed_run_can_be_resumed(slurm, untimed):
    run = untimed / "resumed"
    first = runs.job_of(run)
    assert runs.wait_over(slurm, run)["state"] == "failed"
    done = runs.verb("resume", run)
    assert done.returncode == 0, done.stderr
    assert runs.job_of(run) != first
    # Each attempt gets five updates further before its fault.
    assert runs.wait_over(slurm, run)["state"] in ("failed", "finished")
    assert runs.first_records(run)[1]["update"] >= 4
    assert runs.first_records(run)[1]["restart"]["why"] == "resumed"


def test_a_job_cancelled_behind_our_back_is_called_so(slurm, tmp_path):
    run = tmp_path / "run"
    job = runs.submit(slurm, run, "train.updates=500", "job.pause_s=0.05")
    runs.wait_for_update(run, 1)
    slurm.command("scancel", job)
    until(lambda: runs.over(slurm, job), 30, "the job's end")
    time.sleep(1.0)  # it must not come back
    assert runs.queue_state(slurm, job) == "CANCELLED"
    assert runs.status(run)["state"] == "cancelled"


def test_an_error_before_the_ranks_meet_names_its_rank(slurm, untimed):
    ended = runs.wait_over(slurm, untimed / "early")
    assert ended["state"] == "failed"
    assert ended["culprit"]["rank"] is not None


@pytest.mark.timeout(240)
def test_a_run_goes_on_beyond_its_time_limit(slurm, limited, digest_of_60):
    ended = runs.wait_over(slurm, limited, 180)
    assert ended["weights_sha256"] == digest_of_60
    notes = [record["restart"] for n, record in runs.first_records(limited).items() if n]
    assert notes
    assert all(note["why"] == "near its time limit" for note in notes)
    assert all(note["lost_updates"] == 0 for note in notes)


def test_a_killed_rank_costs_a_restart_where_that_is_allowed_and_no_bit(slurm, untimed, tmp_path):
    run = untimed / "killed"
    job = runs.job_of(run)
    expected = runs.reference(tmp_path / "local", TINY, *KILLED)
    ended = runs.wait_over(slurm, run)
    assert ended["weights_sha256"] == expected
    (note,) = ended["restarts"]
    assert note == runs.first_records(run)[1]["restart"]
    assert note["why"].startswith("rank 1 on ")
    assert note["why"].endswith("failed first: killed by signal 9 (SIGKILL)")
    assert note["resumed_from"] == 2
    assert runs.status(run)["restarts"] == 1
    assert runs.job_of(run) == job


@pytest.mark.timeout(360)
def test_a_stopped_rank_that_is_not_its_nodes_first_is_noticed_in_time_and_costs_no_bit(
    slurm, tmp_path
):
    run = tmp_path / "run"
    more = (
        "cluster.nodes=2", "cluster.ranks_per_node=2", "train.updates=20", "job.pause_s=0.1",
        "train.checkpoint_every=2", "cluster.heartbeat_timeout_s=5",
    )  # fmt: skip
    job = runs.submit(slurm, run, *more)
    runs.wait_for_update(run, 4)
    pid = next(
        pid for pid in runs.processes_of_job(slurm, job)
        if b"SLURM_PROCID=3\0" in Path(f"/proc/{pid}/environ").read_bytes()
        and b"node_entry" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )  # fmt: skip
    os.kill(pid, signal.SIGSTOP)
    stopped = time.monotonic()
    until((run / "attempts" / "000" / "departure.json").exists, 20, "the notice")
    assert time.monotonic() - stopped < 15
    ended = runs.wait_over(slurm, run, 150)
    assert ended["weights_sha256"] == runs.reference(tmp_path / "local", *more, "job.pause_s=0")
    why = ended["restarts"][0]["why"]
    seen = r"it was last seen at .*(?:of|follows) update"
    assert re.search(rf"it was frozen \(SIGSTOP\) for 5 s .*; {seen}", why)
