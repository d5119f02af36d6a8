"""Start a daemon and wait until it is ready; register accounts; make nodes take jobs."""

import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil

from slurm import client, processes
from slurm.config_files import ACCOUNT, ClusterSpec
from slurm.daemons import ACCOUNTING, CONTROLLER, DATABASE, MUNGED
from slurm.errors import DevClusterError
from slurm.install import program, search_path
from slurm.layout import Layout
from slurm.polling import wait_until
from slurm.processes import Daemon

# Generous: a cold start on a busy machine is slow, and a dead daemon ends the wait at once.
_READY_SECONDS = 60
_USABLE = {"idle", "mixed", "allocated", "completing", "reserved", "planned"}
_OUTPUT_LINES = 12
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


def create_tables(spec: ClusterSpec, at: Layout) -> None:
    """Make MariaDB's own tables, once. Partial ones are made again."""
    if at.database.exists():
        return
    aside = at.root / "mysql.new"
    if aside.exists():
        shutil.rmtree(aside)
    done = subprocess.run(
        [
            program("mariadb-install-db"),
            f"--defaults-file={at.my_cnf}",
            f"--datadir={aside}",
            # The cluster's user is authenticated by the socket, without a password.
            "--auth-root-authentication-method=socket",
            f"--auth-root-socket-user={spec.user}",
            "--skip-test-db",
            "--skip-name-resolve",
        ],
        env={"PATH": search_path(), "HOME": str(Path.home())},
        cwd=at.root,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-_OUTPUT_LINES:])
        raise DevClusterError(f"mariadb-install-db ended with {done.returncode}:\n{tail}")
    aside.rename(at.database)


def register_account(spec: ClusterSpec, at: Layout) -> None:
    """Register the cluster, the account and the user with slurmdbd, which slurmctld needs."""
    cluster, user = f"cluster={spec.cluster_name}", f"user={spec.user}"
    show = ("sacctmgr", "-n", "-P", "show", "assoc", cluster, f"account={ACCOUNT}", user)
    if client.call(at, *show, "format=user").strip():
        return
    known = client.call(at, "sacctmgr", "-n", "-P", "show", "cluster", "format=cluster").split()
    if spec.cluster_name not in known:
        client.call(at, "sacctmgr", "-i", "add", "cluster", spec.cluster_name)
    accounts = client.call(at, "sacctmgr", "-n", "-P", "show", "account", "format=account")
    if ACCOUNT not in accounts.split():
        client.call(at, "sacctmgr", "-i", "add", "account", ACCOUNT, cluster)
    client.call(at, "sacctmgr", "-i", "add", "user", spec.user, f"account={ACCOUNT}", cluster)


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
