"""MindSpore on SLURM: ranks meet without `msrun`, stop together and come back."""

import json

import pytest

from orchestrator.errors import describe_status
from tests.helpers import node_process, until
from tests.hold import Hold
from tests.slurm import runs

pytestmark = [pytest.mark.slurm, pytest.mark.long]

LINE = (
    "job._target_=tests.engine.mindspore.jobs.SlowLine",
    "train.updates=60",
    "accumulation.global_batch=128",
    "train.checkpoint_every=25",
    "optimizer=sgd",
)


def test_preempted_once_and_killed_once_it_ends_with_the_bits_of_one_left_alone(slurm, tmp_path):
    run = tmp_path / "run"
    hold = Hold(tmp_path / "hold").hold_before(59)
    job = runs.submit(
        slurm,
        run,
        *LINE,
        "job.pause_s=0.03",
        hold.override,
        "cluster.partition=low",
        "run.max_restarts=1",
    )
    runs.wait_for_update(run, 5)
    other = runs.occupy(slurm, "true", "-p", "high", "-N", "4", "--exclusive")
    until(lambda: runs.over(slurm, other), what="the preempting job's end")
    runs.wait_for_update(run, 25, attempt=1)
    node_process(run, "rank 1").kill()
    hold.release()
    expected = runs.reference(tmp_path / "local", *LINE)
    ended = runs.wait_over(slurm, run)
    assert ended["state"] == "finished"
    assert "mindspore" in json.loads((run / "environment.json").read_text())["framework"]
    assert ended["weights_sha256"] == expected
    preempted, killed = ended["restarts"]
    assert (preempted["why"], preempted["lost_updates"]) == ("preempted", 0)
    assert preempted["resumed_from"] > 5
    assert killed["why"].startswith("rank 1 on ")
    assert killed["why"].endswith(describe_status(-9))
    assert killed["resumed_from"] == 25
    assert runs.processes_of_job(slurm, job) == []
