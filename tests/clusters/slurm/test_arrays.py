"""Scripts of arrays, run by bash as an element would run them, and runs in an allocation."""

import os
import subprocess

import pytest

from orchestrator.clusters.api import Request, cluster_of
from orchestrator.clusters.slurm.arrays import array_script, lay_out
from orchestrator.clusters.slurm.cluster import SlurmCluster
from orchestrator.config.composer import compose
from orchestrator.errors import ClusterError
from orchestrator.rundir.folder import RunDir
from orchestrator.snapshot import CODE_VARIABLE, submitted
from tests.refusals import mentions, refused

pytestmark = pytest.mark.whole_runs


def test_a_runs_own_script_finds_the_users_umask(tmp_path):
    run = tmp_path / "a 'b' $c" / "2"
    (run / "submitit").mkdir(parents=True)
    (run / "submitit" / "000.sh").write_text('echo "umask $(umask)"\n')
    asked = Request(
        run=run,
        attempt=0,
        nodes=1,
        ranks_per_node=1,
        text="",
        details={"options": {"job-name": "a sweep's", "nodes": "1"}},
    )
    text = array_script([asked], None)
    assert "#SBATCH --array=2" in text
    done = subprocess.run(
        ["bash", "-c", 'umask 027; exec bash -c "$1"', "-", text],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "SLURM_ARRAY_TASK_ID": "2"},
        check=True,
    )
    assert done.stdout == "umask 0027\n"


def test_runs_of_an_array_start_from_one_copy_of_the_code(tmp_path):
    cluster = SlurmCluster(compose(["+cluster=slurm", "cluster.nodes=1"]))
    runs = [RunDir(tmp_path / name) for name in "012"]
    for run in runs:
        run.create()
    for number, (attempt, some) in enumerate([(0, runs[:2]), (0, runs[2:]), (1, runs)]):
        lay_out(tmp_path, [(cluster, cluster.request(run.path, attempt)) for run in some])
        copy = tmp_path / "code" / f"{number:03d}"
        assert submitted({CODE_VARIABLE: str(copy)})["git"]["folder"]
        for run in some:
            script = (run.submitit / f"{attempt:03d}.sh").read_text()
            assert f"export {CODE_VARIABLE}={copy}\n" in script
            assert f"python -u -P {copy}/0/orchestrator/clusters/slurm/node_entry.py" in script


SHELL = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}


@pytest.mark.parametrize(
    ("shell", "asked", "names"),
    [
        (
            {},
            "nodes=2",
            "cluster.allocation=current SLURM_JOB_ID salloc --nodes=2 --cpus-per-task=6",
        ),
        (SHELL, "nodes=4", "cluster.nodes=4 job 7 3 cluster.nodes=3 salloc --nodes=4"),
        (SHELL, "nodes=2", None),
        ({"SLURM_JOB_ID": "7"}, "nodes=9", None),  # srun knows the rest
    ],
)
def test_what_the_allocation_does_not_have_is_refused(monkeypatch, shell, asked, names):
    for name in SHELL:
        monkeypatch.delenv(name, raising=False)
    for name, value in shell.items():
        monkeypatch.setenv(name, value)
    base = ("+cluster=slurm", "cluster.allocation=current", "cluster.cpus_per_rank=2")
    cluster = cluster_of(compose([*base, "cluster.ranks_per_node=3", f"cluster.{asked}"]))
    if names is None:
        assert mentions(cluster.check(None).message, "job 7")
        return
    with refused(ClusterError, names):
        cluster.check(None)
