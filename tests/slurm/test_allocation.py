"""Runs inside an existing allocation (`cluster.allocation=current`): it outlives them."""

import json
import os
import re

import pytest

from orchestrator.clusters.api import cluster_of
from orchestrator.config.composer import compose
from orchestrator.errors import ClusterError
from tests import helpers
from tests.programs import QUICK, WAITS, script
from tests.slurm.runs import BATCH, QUIET, processes_of_job, queue_state, verb
from tests.slurm.test_interruptions import log

CURRENT = ("+cluster=slurm", "cluster.allocation=current", "cluster.ranks_per_node=2")


@pytest.fixture(scope="module")
def shell(slurm):
    """Return the environment of a shell in an allocation of two nodes."""
    options = ("-N2", "--ntasks-per-node=2", "--gpus-per-node=1", "--time=10", "--no-shell")
    done = slurm.command("salloc", *options)
    job = slurm.command("squeue", "-h", "-n", "no-shell", "-o", "%A").split()
    assert len(job) == 1, done
    yield {"SLURM_JOB_ID": job[0], "SLURM_CONF": str(slurm.slurm_conf), **QUIET}
    assert queue_state(slurm, job[0]) == "RUNNING", "the allocation is its owner's"
    helpers.until(lambda: not processes_of_job(slurm, job[0]), 20, "the end of all steps")
    slurm.command("scancel", job[0])


def start(shell, folder, *before, program=("train.py",), how=helpers.call):
    words = (*CURRENT, f"run.dir={folder / 'run'}", *before, "--", *program)
    return how("run", *words, module="orchestrator", cwd=folder, **shell)


REFUSED = (
    # SLURM_JOB_ID ("": the shell's), the request, the message
    (None, "nodes=2", r"here is none \(SLURM_JOB_ID is not set\); begin one: salloc --nodes=2"),
    ("99999", "nodes=2", "job 99999, which this shell was in .* is over; begin another: "),
    ("", "nodes=4", r"has 2 nodes \(n\d, n\d\); try cluster.nodes=2"),
    ("", "ranks_per_node=3", "takes 3 CPUs of a node, but job .* has 2; try .*per_node=2"),
    ("", "gpus_per_node=2", r"but job \d+ has 1 on a node\na larger one: salloc"),
)


def test_what_the_allocation_does_not_have_is_refused_before_anything_is_written(
    slurm, shell, monkeypatch
):
    monkeypatch.setenv("SLURM_CONF", shell["SLURM_CONF"])
    for job, asked, said in REFUSED:
        if job is None:
            monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        else:
            monkeypatch.setenv("SLURM_JOB_ID", job or shell["SLURM_JOB_ID"])
        cluster = cluster_of(compose([*CURRENT, *BATCH, f"cluster.{asked}"]))
        with pytest.raises(ClusterError, match=said):
            cluster.check(None)


@pytest.mark.parametrize("asked", [("-N1", "--array=1-2", "--exclusive"), ("-N1", ":", "-N2")])
def test_in_an_array_or_heterogeneous_job_the_allocation_is_the_one_that_srun_uses(
    slurm, monkeypatch, tmp_path, asked
):
    said = f"{tmp_path}/$SLURM_JOB_ID"
    (tmp_path / "job").write_text(f"#!/bin/sh\nenv >{said}.part\nmv {said}.part {said}\nsleep 60\n")
    words = ("--parsable", "--chdir=/tmp", "--output=/dev/null", *asked, tmp_path / "job")
    job = slurm.command("sbatch", *map(str, words)).strip()
    place = tmp_path / job  # the last element of an array has the array's number
    helpers.until(lambda: place.exists() and not slurm.command("squeue", "-ht", "PD").strip(), 30)
    for line in place.read_text().splitlines():
        if line.startswith("SLURM_"):
            monkeypatch.setenv(*line.split("=", 1))
    monkeypatch.setenv("SLURM_CONF", str(slurm.slurm_conf))
    cluster = cluster_of(compose([*CURRENT[:2], *BATCH, "cluster.ranks_per_node=1"]))
    try:
        with pytest.raises(ClusterError, match=r"job \d+ has 1 node \(n\d\); try cluster.nodes=1"):
            cluster.check(None)
    finally:
        slurm.command("scancel", job)


FAILS = f"""{QUICK}
assert os.environ["SLURM_JOB_NUM_NODES"] == "1" and os.environ["WORLD_SIZE"] == "2"
if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("the first time")
"""


def test_ranks_on_a_part_of_the_allocation_know_that_part_and_a_failed_one_starts_again(
    shell, tmp_path
):
    script(tmp_path, FAILS)
    done = start(shell, tmp_path, "cluster.nodes=1", "run.max_restarts=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search("rank 1 on n. failed first: ValueError: the first time", done.stdout)
    assert re.search(r"restarts +1", done.stdout)


def test_another_shell_cancels_a_run_and_resume_goes_on_in_the_same_allocation(shell, tmp_path):
    script(tmp_path, QUICK + WAITS)
    process = start(shell, tmp_path, how=helpers.begin)
    helpers.until(lambda: len(list(tmp_path.glob("here-*"))) == 4, what="the program")
    assert json.loads(verb("status", tmp_path / "run", "--json").stdout)[0]["state"] == "running"
    assert verb("cancel", tmp_path / "run").returncode == 0
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3, output
    (tmp_path / "go").touch()
    again = helpers.call("resume", tmp_path / "run", module="orchestrator", **shell)
    assert again.returncode == 0, again.stdout + again.stderr
    assert log(tmp_path, 3).count("begins") == 2


def test_no_rank_outlives_its_launcher(slurm, shell, tmp_path):
    script(tmp_path, QUICK + WAITS)
    process = start(shell, tmp_path, how=helpers.begin)
    helpers.until(lambda: len(list(tmp_path.glob("here-*"))) == 4, what="the program")
    os.kill(process.pid, 9)
    process.communicate(timeout=60)
    helpers.until(
        lambda: not processes_of_job(slurm, shell["SLURM_JOB_ID"]), 20, "the end of all ranks"
    )
    state = json.loads(verb("status", tmp_path / "run", "--json").stdout)[0]
    assert (state["state"], state["reason"]) == ("lost", "its launcher is gone, without a result")
