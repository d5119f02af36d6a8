"""MindSpore on SLURM: ranks started by srun meet without `msrun`, leave together, come back."""

import json
import time

import pytest

from tests.helpers import until
from tests.slurm import runs

LINE = ("job._target_=tests.engine.mindspore.jobs.SlowLine", "train.updates=60",
        "accumulation.global_batch=128", "train.checkpoint_every=25", "optimizer=sgd")  # fmt: skip


@pytest.mark.timeout(200)
def test_a_preempted_run_goes_on_to_the_bits_of_one_left_alone(slurm, tmp_path):
    run = tmp_path / "run"
    job = runs.submit(slurm, run, *LINE, "job.pause_s=0.03", "cluster.partition=low")
    runs.wait_for_update(run, 5)
    other = runs.occupy(slurm, "true", "-p", "high", "-N", "4", "--exclusive")
    until(lambda: runs.over(slurm, other), 60, "the preempting job's end")
    free = time.monotonic()
    until(lambda: runs.queue_state(slurm, job) == "RUNNING", 60, "the run's restart")
    assert time.monotonic() - free < 20
    expected = runs.reference(tmp_path / "local", *LINE)
    ended = runs.wait_over(slurm, run)
    assert ended["state"] == "finished"
    assert "mindspore" in json.loads((run / "environment.json").read_text())["framework"]
    assert ended["weights_sha256"] == expected
    (note,) = ended["restarts"]
    assert (note["why"], note["lost_updates"]) == ("preempted", 0)
    assert note["resumed_from"] > 5
    assert runs.processes_of_job(slurm, job) == []
