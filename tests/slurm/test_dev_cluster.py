"""The development cluster is a real SLURM: what the other tests rely on, and that it cleans up."""

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from slurm import breaking
from slurm.dev_cluster import DevCluster
from slurm.errors import DevClusterError
from slurm.layout import layout
from slurm.polling import wait_until
from slurm.testing import dev_cluster


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    # pytest's own temporary folders are too long for the paths of Unix sockets.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with short_folder() as base, dev_cluster("full", base=base, grace_seconds=0, remove=True) as it:
        yield it


@pytest.fixture
def small() -> Iterator[DevCluster]:
    """One node, no accounting: up in a moment, to be treated roughly."""
    with (
        short_folder() as base,
        dev_cluster("small", nodes=1, accounting=False, base=base, remove=True) as it,
    ):
        yield it


def submit(cluster: DevCluster, script: str, *options: str) -> str:
    out = cluster.state / "%j.out"
    return cluster.command(
        *("sbatch", "--parsable", "--chdir=/tmp", "--open-mode=append", f"--output={out}"),
        *options,
        f"--wrap={script}",
    ).strip()


def output(cluster: DevCluster, job: str) -> list[str]:
    file = cluster.state / f"{job}.out"
    return file.read_text().splitlines() if file.exists() else []


def job_state(cluster: DevCluster, job: str) -> str:
    return cluster.command("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").strip()


def eventually(condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
    wait_until(condition, seconds=seconds, what=what)


def processes_of(cluster: DevCluster) -> list[psutil.Process]:
    """Every living process whose environment names the cluster, whatever it is."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("SLURM_CONF") == str(cluster.slurm_conf):
                found.append(process)
    return found


def test_a_second_up_starts_nothing_and_is_quick(cluster: DevCluster) -> None:
    began = time.monotonic()
    assert cluster.up() == ()
    assert time.monotonic() - began < 2
    assert cluster.status().is_up


def test_up_with_another_shape_is_refused_while_it_runs(cluster: DevCluster) -> None:
    other = DevCluster(cluster.name, nodes=2, base=cluster.state.parent)
    with pytest.raises(DevClusterError, match=r"nodes=4.*nodes=2.*down"):
        other.up()


def test_srun_runs_tasks_on_two_nodes(cluster: DevCluster) -> None:
    said = cluster.command("srun", "-N2", "--ntasks-per-node=4", "printenv", "SLURMD_NODENAME")
    nodes = said.split()
    assert len(nodes) == 8
    assert sorted(map(nodes.count, set(nodes))) == [4, 4]


def test_sacct_shows_a_finished_job_with_its_account_and_exit_code(cluster: DevCluster) -> None:
    job = submit(cluster, "exit 3", "--account=dev")

    def row() -> str:
        return cluster.command("sacct", "-n", "-X", "-P", "-j", job, "-o", "state,account,exitcode")

    eventually(lambda: row().strip() == "FAILED|dev|3:0", f"sacct knew how job {job} ended")


def test_gpus_are_given_out_through_cuda_visible_devices(cluster: DevCluster) -> None:
    each = cluster.command(
        *("srun", "-N2", "--gpus-per-node=2", "--ntasks-per-node=1"),
        *("printenv", "CUDA_VISIBLE_DEVICES"),
    )
    assert each.split() == ["0,1", "0,1"]


@pytest.mark.parametrize(
    "options",
    [["-N5"], ["--gpus-per-node=5"], ["--mem=99G"], ["-p", "short", "-t", "2"], ["-p", "absent"]],
    ids=" ".join,
)
def test_an_impossible_request_is_refused_at_submission(
    cluster: DevCluster, options: list[str]
) -> None:
    with pytest.raises(DevClusterError, match="Batch job submission failed"):
        submit(cluster, "true", *options)


def test_a_job_in_high_preempts_one_in_low_which_restarts(cluster: DevCluster) -> None:
    low = submit(
        cluster, "echo run ${SLURM_RESTART_COUNT:-0}; exec sleep 60", "-p", "low", "-N4", "-n32"
    )
    eventually(lambda: output(cluster, low) == ["run 0"], f"job {low} ran")
    high = submit(cluster, "true", "-p", "high", "-N1", "--exclusive")
    eventually(lambda: job_state(cluster, high) == "COMPLETED", f"job {high} went first")
    eventually(lambda: "run 1" in output(cluster, low), f"job {low} restarted")
    cluster.command("scancel", low)


def test_nothing_listens_beyond_the_address_of_the_hosts_name(cluster: DevCluster) -> None:
    if not cluster.spec.confined:
        pytest.skip("this machine's name means a loopback address other than 127.0.0.1")
    job = submit(cluster, "srun sleep 30", "-N2", "--ntasks-per-node=1")
    eventually(lambda: len(cluster.node_pids("n1").tasks) > 0, f"a step of job {job} ran")
    addresses: set[str] = set()
    programs: set[str] = set()
    for process in processes_of(cluster):
        with contextlib.suppress(psutil.NoSuchProcess):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    addresses.add(connection.laddr[0])
                    programs.add(process.name())
    cluster.command("scancel", job)
    assert {"slurmctld", "slurmd", "slurmdbd", "srun"} <= programs
    assert "mariadbd" not in programs
    assert addresses == {cluster.spec.address}


def test_a_nodes_processes_are_told_by_job_step_and_rank(cluster: DevCluster) -> None:
    job = submit(cluster, "srun sleep 30", "-N2", "--ntasks-per-node=2", "--nodelist=n2,n3")
    eventually(
        lambda: {t.rank for t in cluster.node_pids("n3").tasks} == {2, 3}, f"job {job} had ranks"
    )
    batch_host, other = cluster.node_pids("n2"), cluster.node_pids("n3")
    assert {d.step for d in batch_host.step_daemons} == {"batch", "0"}
    assert {d.step for d in other.step_daemons} == {"0"}
    assert {t.job for t in (*batch_host.tasks, *other.tasks)} == {int(job)}
    assert batch_host.slurmd != other.slurmd

    breaking.kill_jobs(cluster, "n3")
    assert cluster.node_pids("n3").job_pids == ()
    assert cluster.node_pids("n3").slurmd == other.slurmd
    cluster.command("scancel", job)


def test_a_node_set_down_loses_its_job_and_up_mends_it(cluster: DevCluster) -> None:
    job = submit(cluster, "sleep 60", "--nodelist=n1")
    eventually(lambda: job_state(cluster, job) == "RUNNING", f"job {job} ran")
    breaking.set_node_down(cluster, "n1")
    eventually(lambda: job_state(cluster, job) == "PENDING", f"job {job} was requeued")
    assert not cluster.status().is_up
    cluster.command("scancel", job)
    cluster.up()
    assert cluster.status().is_up


def test_a_crashed_node_has_no_process_left_and_up_mends_it(cluster: DevCluster) -> None:
    job = submit(cluster, "srun sleep 60", "--nodelist=n0")
    eventually(lambda: len(cluster.node_pids("n0").tasks) > 0, f"job {job} ran")
    breaking.crash_node(cluster, "n0")
    dead = cluster.node_pids("n0")
    assert (dead.slurmd, dead.job_pids) == (None, ())
    cluster.command("scancel", job)
    assert cluster.up() == ("slurmd-n0",)
    assert cluster.command("srun", "--nodelist=n0", "echo", "back") == "back\n"


def test_two_clusters_live_side_by_side(cluster: DevCluster, small: DevCluster) -> None:
    assert not {*cluster.spec.ports} & {*small.spec.ports}
    names = [c.command("srun", "printenv", "SLURM_CLUSTER_NAME") for c in (cluster, small)]
    assert names == ["full\n", "small\n"]
    small.down()
    assert cluster.status().is_up


def test_up_after_all_daemons_were_killed_keeps_jobs_and_history(cluster: DevCluster) -> None:
    done = submit(cluster, "true")
    running = submit(cluster, "sleep 60")
    eventually(lambda: job_state(cluster, done) == "COMPLETED", f"job {done} ended")
    eventually(lambda: job_state(cluster, running) == "RUNNING", f"job {running} ran")
    # slurmctld saves its state within 5 s; what it had not saved is lost, as in a real crash.
    saved = cluster.layout.controller_state / "job_state"
    since = time.time()
    submit(cluster, "true")  # where all is saved already, nothing would be saved again
    eventually(lambda: saved.exists() and saved.stat().st_mtime > since, "slurmctld saved")
    breaking.kill_every_daemon(cluster)
    assert not any(cluster.status().daemons.values())

    assert set(cluster.up()) == {*cluster.status().daemons}
    assert job_state(cluster, running) == "RUNNING"
    eventually(lambda: done in cluster.command("sacct", "-n", "-X", "-o", "jobid"), "sacct knew")
    cluster.command("scancel", running)


def test_down_leaves_no_process_even_of_jobs_that_ignore_signals(small: DevCluster) -> None:
    job = submit(small, "trap '' TERM CONT; while :; do sleep 1; done", "-N1")
    eventually(lambda: len(small.node_pids("n0").tasks) > 1, f"job {job} ran")
    assert small.down()
    assert [p.cmdline() for p in processes_of(small) if p.status() != psutil.STATUS_ZOMBIE] == []
    assert not small.down()


def test_job_ids_go_on_after_down_and_up(small: DevCluster) -> None:
    first = submit(small, "true")
    small.down()
    small.up()
    assert int(submit(small, "true")) > int(first)


def test_a_pid_file_that_names_another_process_harms_nobody(small: DevCluster) -> None:
    small.down()
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        for daemon in small.status().daemons:
            small.layout.pid_file(daemon).write_text(f"{bystander.pid}\n")
        assert not small.down()
        assert set(small.up()) == {"munged", "slurmctld", "slurmd-n0"}
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize("name", ["", "Upper", "a/b", "../x", "-x", "x" * 25])
def test_a_name_that_is_no_folder_or_cluster_name_is_refused(name: str) -> None:
    with pytest.raises(DevClusterError, match="name must be"):
        layout(name)


def test_a_folder_too_long_for_sockets_is_refused_before_anything_starts() -> None:
    with pytest.raises(DevClusterError, match="ORCHESTRATOR_SLURM_DEV"):
        DevCluster("x", base=Path("/") / ("long" * 20))
