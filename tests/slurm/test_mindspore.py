"""MindSpore on SLURM: ranks started by srun meet without `msrun`, leave together, come back."""

import json
import os
import re
import signal
import sys
import time

import pytest

from tests.engine.mindspore.under_msrun import TRAIN, under_msrun
from tests.helpers import processes_of, until
from tests.programs import script
from tests.slurm import runs
from tests.slurm.test_programs import submit

LINE = ("job._target_=tests.engine.mindspore.jobs.SlowLine", "train.updates=60",
        "accumulation.global_batch=128", "train.checkpoint_every=25", "optimizer=sgd")  # fmt: skip


def rank_of(run, rank):
    """The process of a rank, on whatever node."""
    tasks = [p for p in processes_of(run) if "rank" in p.cmdline()]
    return next(p.pid for p in tasks if p.environ().get("SLURM_PROCID") == str(rank))


@pytest.mark.timeout(200)
def test_preempted_once_and_a_rank_killed_once_it_ends_with_the_bits_of_one_left_alone(
    slurm, tmp_path
):
    run = tmp_path / "run"
    job = runs.submit(slurm, run, *LINE, "job.pause_s=0.03", "cluster.partition=low",
                      "run.max_restarts=1")  # fmt: skip
    runs.wait_for_update(run, 5)
    other = runs.occupy(slurm, "true", "-p", "high", "-N", "4", "--exclusive")
    until(lambda: runs.over(slurm, other), 60, "the preempting job's end")
    free = time.monotonic()
    until(lambda: runs.queue_state(slurm, job) == "RUNNING", 60, "the run's restart")
    assert time.monotonic() - free < 20
    runs.wait_for_update(run, 25, attempt=1)
    os.kill(rank_of(run, 1), signal.SIGKILL)
    expected = runs.reference(tmp_path / "local", *LINE)
    ended = runs.wait_over(slurm, run)
    assert ended["state"] == "finished"
    assert "mindspore" in json.loads((run / "environment.json").read_text())["framework"]
    assert ended["weights_sha256"] == expected
    preempted, killed = ended["restarts"]
    assert (preempted["why"], preempted["lost_updates"]) == ("preempted", 0)
    assert preempted["resumed_from"] > 5
    assert killed["why"].startswith("rank 1 on ")
    assert killed["why"].endswith("failed first: killed by signal 9 (SIGKILL)")
    assert killed["resumed_from"] == 25
    assert runs.processes_of_job(slurm, job) == []


@pytest.mark.timeout(200)
def test_a_script_in_a_shell_script_ends_with_the_bits_that_it_has_under_msrun(slurm, tmp_path):
    script(tmp_path, TRAIN)
    script(tmp_path, f'#!/bin/sh\n{sys.executable} train.py "$@"\n', "train.sh", run=True)
    submit(slurm, tmp_path, "job.style=mindspore", program=("./train.sh",))
    under_msrun(tmp_path, 2, timeout=120)
    assert runs.wait_over(slurm, tmp_path / "run")["state"] == "finished"
    logs = [f"{at}{rank}.log" for at in ("theirs/worker_", "run/logs/rank-0000") for rank in "01"]
    said = [re.findall("^final .*", (tmp_path / log).read_text(), re.MULTILINE) for log in logs]
    assert [len(lines) for lines in said] == [1] * 4
    assert len({line for lines in said for line in lines}) == 1, "equal bits"
