"""A rank that fails ends the job as FAILED at once, with its name, and leaves nothing behind."""

import json
import re

import pytest

from tests.helpers import until
from tests.slurm import runs

KILLED = ("cluster.ranks_per_node=2", "job.fault=kill", "job.fault_rank=3")
ACTING = ("job._target_=tests.light_job.Lively", "train.updates=999", "train.evaluate_every=0")
FAILING = {
    # settings, the culprit's rank (None: any), its cause
    "killed": (KILLED, 3, "killed by signal 9 (SIGKILL)"),
    "all leave with exit code 0": (
        (*ACTING, "+job.act=exit0", "+job.ranks=all"), None,
        "exited with code 0 before its training had ended"),
    "a job's only rank is frozen": (
        (*ACTING, "+job.act=stop", "cluster.nodes=1", "cluster.heartbeat_timeout_s=4"), 0,
        "it was frozen (SIGSTOP) for 4 s"),
}  # fmt: skip


def folder_name(name):
    return re.sub(r"\W+", "-", name)


@pytest.fixture(scope="module")
def failing(slurm, tmp_path_factory):
    """Runs that fail, all at once."""
    folder = tmp_path_factory.mktemp("failing")
    for name, (more, *_) in FAILING.items():
        runs.submit(
            slurm, folder / folder_name(name), "train.updates=30", "cluster.requeue=false", *more
        )
    return folder


@pytest.mark.parametrize("name", FAILING)
def test_a_failing_rank_fails_the_job_and_is_named(slurm, failing, name):
    _, rank, cause = FAILING[name]
    run = failing / folder_name(name)
    ended = runs.wait_over(slurm, run)
    culprit = ended["culprit"]
    assert ended["state"] == "failed"
    assert rank in (None, culprit["rank"])
    assert culprit["cause"].startswith(cause)
    nodes = [json.loads(f.read_text()) for f in (run / "attempts" / "000").glob("node-*.json")]
    assert rank is None or [culprit["node"]] == [n["node"] for n in nodes if rank in n["ranks"]]
    job = runs.job_of(run)
    assert runs.accounted(slurm, job) == "FAILED"
    until(lambda: not runs.processes_of_job(slurm, job), 20, "the end of every process")
    found = until(lambda: (now := runs.status(run))["state"] != "ending" and now, 20, "its end")
    assert (found["state"], found["reason"]) == ("failed", culprit["cause"])


def test_a_run_folder_that_the_nodes_cannot_see_is_named_as_the_cause(slurm, tmp_path):
    run = tmp_path / "run"
    runs.submit(slurm, run, "train.updates=1", "+cluster.slurm_flags.begin=now+3600")
    run.rename(tmp_path / "elsewhere")
    runs.release(slurm, tmp_path / "elsewhere")
    until(lambda: runs.over(slurm, runs.job_of(tmp_path / "elsewhere")), 60, "the job's end")
    found = runs.status(tmp_path / "elsewhere")
    assert found["state"] == "failed"
    assert "not visible" in found["reason"]
