"""Runs and sweeps as Python objects on a real SLURM."""

import pytest

import orchestrator
from orchestrator.errors import ClusterError
from tests import warm
from tests.helpers import environment
from tests.refusals import refused
from tests.slurm import runs

pytestmark = pytest.mark.slurm


@pytest.fixture
def words(slurm, tmp_path, monkeypatch):
    """Return the words of a short run on the cluster, as a notebook in `tmp_path` states them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", warm.PATH)
    for name in [name for name in environment() if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    return [*runs.overrides(slurm, tmp_path / "run", *runs.SHAPE, "train.updates=20")]


def test_start_returns_after_submission_and_the_run_is_resumed_and_read(words):
    run = orchestrator.start(*words)
    assert run.status.job_id == runs.job_of(run.folder)
    assert run.state in ("pending", "starting", "running", "ending", "finished")
    assert run.wait(120) == "finished"
    assert [row["update"] for row in run.metrics] == list(range(20))
    assert orchestrator.open_run(run.folder).resume("train.updates=24").wait(120) == "finished"
    assert run.result["updates"] == 24
    with refused(ClusterError, f"{run.folder} cancel"):
        run.cancel()


def test_what_the_scheduler_refuses_is_raised(words, tmp_path):
    with refused(ClusterError, "cluster.partition=nowhere"):
        orchestrator.start(*words, "cluster.partition=nowhere")
    assert not (tmp_path / "run").exists()


def test_a_sweep_is_submitted_and_waited_for(words):
    sweep = orchestrator.start_sweep(*words, "train.seed=1,2")
    assert sweep.wait(180) == "finished"
    assert [row["train.seed"] for row in sweep.table] == [1, 2]
    assert all(row["updates"] == 20 for row in sweep.table)
