"""Starting one daemon and knowing when it is ready; making every node take jobs."""

import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil

from slurm import client, processes
from slurm.config_files import ClusterSpec
from slurm.daemons import ACCOUNTING, CONTROLLER, DATABASE, MUNGED
from slurm.layout import Layout
from slurm.polling import wait_until
from slurm.processes import Daemon

# Generous: a cold start on a busy machine is slow, and a dead daemon ends the wait at once.
_READY_SECONDS = 60
_USABLE = {"idle", "mixed", "allocated", "completing", "reserved", "planned"}
_SET_ASIDE = {"down", "drained", "draining", "fail", "failing"}


def start_daemon(daemon: Daemon, spec: ClusterSpec, at: Layout) -> None:
    """Start one daemon and return when the next one can rely on it.

    A slurmd is not waited for here: all nodes are, together, by `mend_nodes`.
    """
    sockets = {MUNGED: at.munge_socket, DATABASE: at.database_socket}
    ports = {CONTROLLER: spec.ports[0], ACCOUNTING: spec.ports[1]}
    if daemon.name in sockets:
        # Left behind by one that was killed: it would look ready before it is.
        sockets[daemon.name].unlink(missing_ok=True)
    pid = processes.start(daemon)
    if daemon.name in sockets:
        _wait(daemon, lambda: _accepts(sockets[daemon.name]))
    elif daemon.name in ports:
        _wait(daemon, lambda: _listens(pid, ports[daemon.name]))


def _wait(daemon: Daemon, ready: Callable[[], bool]) -> None:
    def ready_or_dead() -> bool:
        if processes.running_pid(daemon) is None:
            raise processes.why_it_ended(daemon)
        return ready()

    wait_until(ready_or_dead, seconds=_READY_SECONDS, what=f"{daemon.name} was ready")


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True


def _listens(pid: int, port: int) -> bool:
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except psutil.NoSuchProcess:
        return False
    return any(c.status == psutil.CONN_LISTEN and c.laddr[1] == port for c in connections)


def usable(nodes: Mapping[str, str]) -> bool:
    """Return whether every node takes jobs; a '*' says that SLURM cannot reach it."""
    return all(state in _USABLE for state in nodes.values())


def mend_nodes(every: Iterable[Daemon], at: Layout) -> None:
    """Return when every node takes jobs; those that were set aside by hand are set to work.

    `every`: all daemons; one that ends meanwhile is the reason of a node that never comes.
    """
    resumed: set[str] = set()
    states: dict[str, str] = {}

    def all_usable() -> bool:
        for daemon in every:
            if processes.running_pid(daemon) is None:
                raise processes.why_it_ended(daemon)
        states.update(client.node_states(at))
        for node, state in states.items():
            if state in _SET_ASIDE and node not in resumed:
                client.call(at, "scontrol", "update", f"nodename={node}", "state=resume")
                resumed.add(node)
        return usable(states)

    wait_until(all_usable, seconds=_READY_SECONDS, what="every node took jobs (see `sinfo`)")
