"""Runs inside an existing allocation (`cluster.allocation=current`): it outlives them."""

import json
import os
import re

import pytest

from tests import helpers
from tests.programs import QUICK, WAITS, script
from tests.refusals import mentions
from tests.slurm.runs import QUIET, log, processes_of_job, queue_state, verb

pytestmark = [pytest.mark.slurm, pytest.mark.long]

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
    helpers.until(lambda: not processes_of_job(slurm, job[0]), what="the end of all steps")
    slurm.command("scancel", job[0])


def start(shell, folder, *before, program=("train.py",), how=helpers.call):
    words = (*CURRENT, f"run.dir={folder / 'run'}", *before, "--", *program)
    return how("run", *words, module="orchestrator", cwd=folder, **shell)


FAILS = f"""{QUICK}
assert os.environ["SLURM_JOB_NUM_NODES"] == "1" and os.environ["WORLD_SIZE"] == "2"
if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("the first time")
"""


def test_ranks_know_their_part_of_the_allocation_and_a_failed_one_starts_again(shell, tmp_path):
    script(tmp_path, FAILS)
    done = start(shell, tmp_path, "cluster.nodes=1", "run.max_restarts=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"rank 1 on n\d\b.*ValueError: the first time", done.stdout)
    assert re.search(r"restarts +1", done.stdout)


def test_another_shell_cancels_a_run_and_resume_goes_on_in_the_same_allocation(shell, tmp_path):
    script(tmp_path, QUICK + WAITS)
    process = start(shell, tmp_path, how=helpers.begin)
    helpers.until(lambda: len(list(tmp_path.glob("here-*"))) == 4, what="the program")
    assert json.loads(verb("status", tmp_path / "run", "--json").stdout)[0]["state"] == "running"
    verb("cancel", tmp_path / "run", code=0)
    helpers.await_exit(process, 3)
    (tmp_path / "go").touch()
    helpers.call("resume", tmp_path / "run", module="orchestrator", **shell, code=0)
    assert log(tmp_path, 3).count("begins") == 2


def test_no_rank_outlives_its_launcher(slurm, shell, tmp_path):
    script(tmp_path, QUICK + WAITS)
    process = start(shell, tmp_path, how=helpers.begin)
    helpers.until(lambda: len(list(tmp_path.glob("here-*"))) == 4, what="the program")
    os.kill(process.pid, 9)
    process.communicate(timeout=helpers.LIMIT_S)
    helpers.until(
        lambda: not processes_of_job(slurm, shell["SLURM_JOB_ID"]), 20, "the end of all ranks"
    )
    state = json.loads(verb("status", tmp_path / "run", "--json").stdout)[0]
    assert (state["state"], mentions(state["reason"], "launcher")) == ("lost", True)
