"""A rank that fails ends the job as FAILED at once, with its name, and leaves nothing behind."""

import json

from tests.helpers import until
from tests.slurm import runs


def test_a_killed_rank_fails_the_job_and_is_named(slurm, tmp_path):
    run = tmp_path / "run"
    killed = ("cluster.ranks_per_node=2", "job.fault=kill", "job.fault_rank=3")
    job = runs.submit(slurm, run, "train.updates=30", "cluster.requeue=false", *killed)
    ended = runs.wait_over(slurm, run)
    culprit = ended["culprit"]
    assert (ended["state"], culprit["rank"]) == ("failed", 3)
    assert culprit["cause"].startswith("killed by signal 9 (SIGKILL)")
    nodes = [json.loads(f.read_text()) for f in (run / "attempts" / "000").glob("node-*.json")]
    assert [culprit["node"]] == [node["node"] for node in nodes if 3 in node["ranks"]]
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
