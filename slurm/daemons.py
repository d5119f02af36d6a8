"""Daemons of one cluster as values, in the order in which they start."""

from pathlib import Path

from slurm.config_files import ClusterSpec
from slurm.install import program, search_path
from slurm.layout import Layout
from slurm.processes import Daemon

MUNGED, DATABASE, ACCOUNTING, CONTROLLER = "munged", "mariadbd", "slurmdbd", "slurmctld"


def node_daemon_name(node: str) -> str:
    """Return the name of a node's slurmd, as in its pid file and log."""
    return f"slurmd-{node}"


def daemons(spec: ClusterSpec, at: Layout) -> dict[str, Daemon]:
    """Return all daemons by name, in order; in the foreground, so that their pids are known."""
    commands: dict[str, list[str]] = {
        MUNGED: [
            "munged",
            "--foreground",
            # It refuses folders that others cannot enter; ours is private on purpose.
            "--force",
            f"--socket={at.munge_socket}",
            f"--key-file={at.munge_key}",
            f"--pid-file={at.run}/munged.own.pid",
            f"--log-file={at.log_file(MUNGED)}",
            f"--seed-file={at.run}/munged.seed",
            "--origin=127.0.0.1",
        ]
    }
    if spec.shape.accounting:
        commands[DATABASE] = [
            "mariadbd",
            f"--defaults-file={at.my_cnf}",
            f"--log-error={at.log_file(DATABASE)}",
        ]
        commands[ACCOUNTING] = ["slurmdbd", "-D"]
    # `-c`: no recovery without saved state: slurmctld would wait for, and warn of, every file.
    fresh = [] if (at.controller_state / "clustername").exists() else ["-c"]
    commands[CONTROLLER] = ["slurmctld", "-D", "-f", str(at.slurm_conf), *fresh]
    for node in spec.node_names:
        commands[node_daemon_name(node)] = ["slurmd", "-D", "-f", str(at.slurm_conf), "-N", node]
    environment = {
        "PATH": search_path(),
        "HOME": str(Path.home()),
        "SLURM_CONF": str(at.slurm_conf),
        # For the client library: the socket behind "localhost".
        "MYSQL_UNIX_PORT": str(at.database_socket),
    }
    # A slurmd runs in its spool folder, and its step daemons inherit that: they overwrite their
    # command line and the first part of their environment, so the folder identifies them.
    folders = {node_daemon_name(node): at.spool(node) for node in spec.node_names}
    return {
        name: Daemon(
            name=name,
            argv=(program(command[0]), *command[1:]),
            environment=environment,
            folder=folders.get(name, at.run),
            pid_file=at.pid_file(name),
            output=at.output_file(name),
            log=at.log_file(name),
        )
        for name, command in commands.items()
    }
