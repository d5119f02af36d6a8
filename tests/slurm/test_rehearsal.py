"""`rehearse` on SLURM: hands in the job's own allocation, and the scheduler's own commands."""

import json

import pytest

from orchestrator.errors import UsageError
from orchestrator.health.rehearsal import (
    CUT,
    HERE,
    KILL_LAUNCHER,
    KILL_SCRIPT,
    ON_SLURM,
    REQUEUE,
    plan_rehearsal,
)
from tests.helpers import TINY
from tests.slurm import runs

SEED = 1  # the links first


def small(cluster):
    return (
        "+cluster=slurm_dev", f"cluster.slurm_conf={cluster.slurm_conf}", TINY, "job.pause_s=0.05",
        "accumulation.global_batch=32", "accumulation.micro_batch=4", "cluster.nodes=2",
        "cluster.ranks_per_node=1", "train.updates=20",
    )  # fmt: skip


def test_faults_on_slurm_touch_jobs_alone(slurm):
    kinds = plan_rehearsal(small(slurm), None, 1).kinds
    assert kinds == ON_SLURM
    assert {*HERE} - {*kinds} == {KILL_LAUNCHER}


def test_what_the_scheduler_would_refuse_is_refused_before_anything_is_written(slurm):
    once = (*small(slurm), "cluster.requeue=false")
    assert REQUEUE not in plan_rehearsal(once, None, 1).kinds
    with pytest.raises(UsageError, match="queues it once only"):
        plan_rehearsal(once, None, 1, [REQUEUE])
    with pytest.raises(UsageError, match=r"cluster\.nodes"):
        plan_rehearsal((*small(slurm)[:-3], "cluster.nodes=9"), None, 1)


@pytest.mark.timeout(240)
def test_a_job_whose_links_are_cut_and_whose_script_is_killed_ends_with_the_undisturbed_bits(
    slurm, tmp_path
):
    done = runs.verb(
        "rehearse", *small(slurm), "--faults", 2, "--only", f"{CUT},{KILL_SCRIPT}",
        "--seed", SEED, "--into", tmp_path / "of", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [(row["kind"], row["how"]) for row in rows] == [
        (CUT, "survived"), (KILL_SCRIPT, "restart"),
    ]  # fmt: skip
    assert all(row["equal"] and not row["samples_lost"] for row in rows)
    for run in ("undisturbed", "run-001"):
        job = runs.job_of(tmp_path / "of" / run)
        assert runs.over(slurm, job)
        assert not runs.processes_of_job(slurm, job)
