"""Faults of the cluster for tests, each as it happens on a real one; `up()` repairs all of them.

What follows each of them (who is signalled, after how long a job is requeued) is in README.md.
"""

import signal

import psutil

from slurm import jobs, processes
from slurm.daemons import ACCOUNTING, CONTROLLER, MUNGED, daemons
from slurm.dev_cluster import DevCluster
from slurm.errors import DevClusterError


def crash_node(cluster: DevCluster, node: str) -> None:
    """Crash a machine as by a power loss: slurmd, step daemons and tasks die at once."""
    # slurmd first, so that it cannot report the others' end.
    processes.kill(_present(cluster.node_pids(node).slurmd))
    jobs.kill_jobs(cluster.layout, node)


def kill_slurmd(cluster: DevCluster, node: str) -> int:
    """Kill slurmd only: the node's tasks live on, even in the job's restart. Return its pid."""
    pid = cluster.node_pids(node).slurmd
    if pid is None:
        raise DevClusterError(f"node {node} has no slurmd running")
    processes.kill([pid])
    return pid


def kill_jobs(cluster: DevCluster, node: str) -> None:
    """Kill tasks and step daemons, but not slurmd: SLURM notices on the batch host at most."""
    jobs.kill_jobs(cluster.layout, node)


def batch_script(cluster: DevCluster, job: str) -> int:
    """Return the pid of a running job's batch script."""
    for node in cluster.node_names:
        for daemon in cluster.node_pids(node).step_daemons:
            if (str(daemon.job), daemon.step) == (job, "batch"):
                return psutil.Process(daemon.pid).children()[0].pid
    raise DevClusterError(f"job {job} has no batch script running")


def kill_batch_script(cluster: DevCluster, job: str) -> None:
    """Kill only the shell: SLURM then ends the ranks, and calls the job FAILED."""
    processes.kill([batch_script(cluster, job)])


def kill_srun(cluster: DevCluster, job: str) -> None:
    """Kill a running job's srun. The process that srun has forked lives, and kills all tasks.

    If that process were killed too, the tasks would live or not, by which of both died first.
    """
    children = psutil.Process(batch_script(cluster, job)).children(recursive=True)
    sruns = [child for child in children if child.name() == "srun"]
    processes.kill([srun.pid for srun in sruns if srun.parent() not in sruns])


def kill_step_daemon(cluster: DevCluster, job: str, node: str) -> None:
    """Kill the daemon of the ranks' step on a node; its tasks and slurmd live."""
    found = cluster.node_pids(node).step_daemons
    steps = [d.pid for d in found if str(d.job) == job and d.step.isdigit()]
    if not steps:
        raise DevClusterError(f"job {job} has no step running on node {node}")
    processes.kill(steps)


def kill_agents(cluster: DevCluster, job: str) -> None:
    """Kill the agents of a job's nodes and their parents; the kernel kills their ranks then."""
    tasks = [t for node in cluster.node_names for t in cluster.node_pids(node).tasks]
    agents = [t for t in tasks if str(t.job) == job and t.step not in (None, "batch")]
    processes.kill(task.pid for task in agents if task.rank is None)


def signal_rank(cluster: DevCluster, job: str, rank: int, number: signal.Signals) -> str:
    """Signal one rank's processes; return its node."""
    for node in cluster.node_names:
        found = [t for t in cluster.node_pids(node).tasks if (str(t.job), t.rank) == (job, rank)]
        for task in found:
            processes.send(task.pid, number)
        if found:
            return node
    raise DevClusterError(f"job {job} has no rank {rank} running")


def stop_munge(cluster: DevCluster) -> None:
    """Stop munge: every client command fails, and the daemons cannot talk to each other."""
    _stop(cluster, MUNGED)


def stop_accounting(cluster: DevCluster) -> None:
    """Stop slurmdbd: sacct and sacctmgr fail, everything else continues."""
    _stop(cluster, ACCOUNTING)


def set_node_down(cluster: DevCluster, node: str) -> None:
    """Set a node down as an administrator: its jobs are signalled and requeued at once."""
    cluster.command("scontrol", "update", f"nodename={node}", "state=down", "reason=on purpose")


def stop_controller(cluster: DevCluster) -> None:
    """Stop the controller: jobs run on, every client command fails. `up()` starts it again."""
    _stop(cluster, CONTROLLER)


def kill_every_daemon(cluster: DevCluster) -> None:
    """Kill all daemons by SIGKILL; jobs' processes live on, as after a crash."""
    every = daemons(cluster.spec, cluster.layout).values()
    processes.kill(pid for daemon in every for pid in _present(processes.running_pid(daemon)))


def _stop(cluster: DevCluster, name: str) -> None:
    daemon = daemons(cluster.spec, cluster.layout)[name]
    processes.end(_present(processes.running_pid(daemon)), patience_seconds=20)


def _present(pid: int | None) -> list[int]:
    return [] if pid is None else [pid]
