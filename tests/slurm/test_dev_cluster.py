"""The development cluster is a real SLURM: what the other tests rely on, and that it cleans up."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slurm.dev_cluster import DevCluster
from slurm.errors import DevClusterError
from slurm.layout import layout
from slurm.polling import wait_until
from slurm.testing import dev_cluster
from tests.refusals import refused

pytestmark = pytest.mark.slurm


@pytest.fixture
def small(base: Path) -> Iterator[DevCluster]:
    """One node, no accounting: up in a moment, to be treated roughly."""
    with dev_cluster("small", nodes=1, accounting=False, base=base, remove=True) as cluster:
        yield cluster


def submit(cluster: DevCluster, script: str, *options: str) -> str:
    out = cluster.state / "%j.out"
    return cluster.command(
        *("sbatch", "--parsable", "--chdir=/tmp", "--open-mode=append", f"--output={out}"),
        *options,
        f"--wrap={script}",
    ).strip()


def processes_of(cluster: DevCluster) -> list[psutil.Process]:
    """Every living process whose environment names the cluster, whatever it is."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("SLURM_CONF") == str(cluster.slurm_conf):
                found.append(process)
    return found


def test_a_second_cluster_goes_down_without_a_trace_and_comes_up_again(slurm, small):
    assert not {*slurm.spec.ports} & {*small.spec.ports}
    names = [c.command("srun", "printenv", "SLURM_CLUSTER_NAME") for c in (slurm, small)]
    assert names == [f"{slurm.name}\n", "small\n"]
    other = DevCluster(small.name, nodes=2, base=small.state.parent)
    with pytest.raises(DevClusterError, match=r"nodes=1.*nodes=2.*down"):
        other.up()
    job = submit(small, "trap '' TERM CONT; while :; do sleep 1; done", "-N1")
    wait_until(lambda: len(small.node_pids("n0").tasks) > 1, seconds=30, what=f"job {job} ran")
    assert small.down()
    assert [p.cmdline() for p in processes_of(small) if p.status() != psutil.STATUS_ZOMBIE] == []
    assert slurm.status().is_up
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        for daemon in small.status().daemons:
            small.layout.pid_file(daemon).write_text(f"{bystander.pid}\n")
        assert not small.down()
        assert set(small.up()) == {"munged", "slurmctld", "slurmd-n0"}
        assert bystander.poll() is None, "a pid file that names another process ends nothing"
    finally:
        bystander.kill()
        bystander.wait()
    assert int(submit(small, "true")) > int(job)


def test_a_name_or_folder_that_cannot_be_is_refused_before_anything_starts():
    for name in ("", "Upper", "a/b", "../x", "-x", "x" * 25):
        with refused(DevClusterError, f"name {name!r}"):
            layout(name)
    with pytest.raises(DevClusterError, match="ORCHESTRATOR_SLURM_DEV"):
        DevCluster("x", base=Path("/") / ("long" * 20))  # too long for sockets
