"""Development cluster: bring up, take down, status, delete.

Any number can run at once under different names; the folder `state` holds all of one cluster.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm import client, processes
from slurm.config_files import KILL_WAIT_SECONDS, ClusterSpec, Shape
from slurm.daemons import (
    ACCOUNTING,
    CONTROLLER,
    DATABASE,
    MUNGED,
    daemons,
    node_daemon_name,
)
from slurm.errors import DevClusterError
from slurm.install import cluster_programs, ensure_installed
from slurm.jobs import NodeProcesses, StepDaemon, Task, job_processes, kill_jobs
from slurm.layout import DEFAULT_NAME, layout
from slurm.polling import first_true
from slurm.preparation import beyond_loopback, decide, load, locked, write_files
from slurm.startup import create_tables, mend_nodes, register_account, start_daemon, usable

_END_SECONDS = 20
_REPORT_SECONDS = 3


@dataclass(frozen=True, kw_only=True)
class Status:
    """State of a cluster.

    Attributes:
        daemons: pid of each daemon; None where one is missing.
        nodes: state of each node as sinfo spells it.
    """

    name: str
    slurm_conf: Path
    daemons: Mapping[str, int | None]
    nodes: Mapping[str, str]

    @property
    def is_up(self) -> bool:
        """Return whether every daemon lives and every node takes jobs."""
        return bool(self.nodes) and None not in self.daemons.values() and usable(self.nodes)


class DevCluster:
    """A real SLURM on this machine. Every method may be called at any time, from any process."""

    def __init__(
        self,
        name: str = DEFAULT_NAME,
        *,
        nodes: int = 4,
        accounting: bool = True,
        base: Path | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Describe a cluster; nothing starts before `up`.

        Args:
            nodes, accounting: of the next start.
            base: the folder of all clusters, see `slurm.layout.base_folder`.
            say: called with a line before each slow step (installing packages).
        """
        self.name = name
        self.layout = layout(name, base)
        self._shape = Shape(nodes=nodes, accounting=accounting)
        self._say = say

    @property
    def state(self) -> Path:
        """Return the folder that holds all of this cluster."""
        return self.layout.root

    @property
    def slurm_conf(self) -> Path:
        """Return the SLURM_CONF with which a client command reaches this cluster."""
        return self.layout.slurm_conf

    @property
    def node_names(self) -> tuple[str, ...]:
        """Return the nodes: n0, n1 and so on."""
        return self.spec.node_names

    def env(self) -> dict[str, str]:
        """Return the environment of client commands: PATH and SLURM_CONF, nothing else."""
        return client.environment(self.layout)

    def command(self, *argv: str) -> str:
        """Return standard output of a client command; raise with its error if it fails."""
        return client.call(self.layout, *argv)

    def up(self) -> tuple[str, ...]:
        """Start the cluster, or repair it; returns once every node takes jobs.

        Returns the daemons that had to be started; nothing, if it was up already. Running jobs
        are left alone. Nodes that were set down or drained take jobs again.
        """
        with locked(self.layout.lock):
            spec = load(self.layout)
            running = self._running(spec)
            if spec is not None and any(running.values()):
                self._refuse_changes(spec)
            else:
                wanted = cluster_programs(accounting=self._shape.accounting)
                ensure_installed(wanted, say=self._say)
                spec = decide(self.name, self.layout, self._shape)
                running = self._running(spec)
                note = beyond_loopback(spec)
                if note is not None:
                    self._say(note)
            started = self._start(spec, [name for name, pid in running.items() if pid is None])
            mend_nodes(daemons(spec, self.layout).values(), self.layout)
            return started

    def _start(self, spec: ClusterSpec, missing: list[str]) -> tuple[str, ...]:
        if not missing:
            return ()
        write_files(spec, self.layout)
        if DATABASE in missing:
            create_tables(spec, self.layout)
        every = daemons(spec, self.layout)
        for name in missing:
            if name == CONTROLLER and spec.shape.accounting:
                register_account(spec, self.layout)
            start_daemon(every[name], spec, self.layout)
        return tuple(missing)

    def down(self) -> bool:
        """Cancel its jobs and end every process of it; return whether there was anything to end.

        Saved state stays: job ids continue counting, and `sacct` remembers.
        """
        with locked(self.layout.lock):
            return self._down()

    def remove(self) -> bool:
        """Take it down and delete its folder; return whether there was one."""
        with locked(self.layout.lock):
            self._down()
            if not self.state.exists():
                return False
            shutil.rmtree(self.state)
            return True

    def _down(self) -> bool:
        spec = load(self.layout)
        running = {name: pid for name, pid in self._running(spec).items() if pid is not None}
        left = [p.pid for p in job_processes(self.layout)]
        if not running and not left:
            return False
        if MUNGED in running and CONTROLLER in running:
            try:
                self._cancel_jobs(running)
            except DevClusterError as error:
                # A controller that does not answer must not keep anything alive.
                self._say(f"jobs could not be cancelled, and are killed instead: {error}")
        nodes = [pid for name, pid in running.items() if name.startswith(node_daemon_name(""))]
        # slurmd first: it must not report the tasks that we kill next as failed nodes' or jobs'.
        processes.end(nodes, patience_seconds=_END_SECONDS)
        kill_jobs(self.layout)
        for name in (CONTROLLER, ACCOUNTING, DATABASE, MUNGED):
            if name in running:
                processes.end([running[name]], patience_seconds=_END_SECONDS)
        return True

    def _cancel_jobs(self, running: Mapping[str, int]) -> None:
        """Cancel jobs in order, so that accounting says CANCELLED, within a bounded time."""
        queued = client.queued_jobs(self.layout)
        if not queued:
            return
        client.call(self.layout, "scancel", "--quiet", *queued)

        def all_ended() -> bool:
            # A dead slurmd forwards no signal: its jobs are killed afterwards.
            return not any(node_daemon_name(p.node) in running for p in job_processes(self.layout))

        first_true(all_ended, seconds=KILL_WAIT_SECONDS)
        kill_jobs(self.layout)
        # While slurmd can still report it: slurmctld waits 5 s for nodes that owe it an answer.
        first_true(lambda: not client.queued_jobs(self.layout), seconds=_REPORT_SECONDS)

    def status(self) -> Status:
        """Return what runs; a controller that does not answer is not queried."""
        spec = load(self.layout)
        running = self._running(spec)
        reachable = running.get(CONTROLLER) is not None and running.get(MUNGED) is not None
        return Status(
            name=self.name,
            slurm_conf=self.slurm_conf,
            daemons=running,
            nodes=client.node_states(self.layout) if reachable else {},
        )

    def node_pids(self, node: str) -> NodeProcesses:
        """Return what runs on one node: its slurmd, the step daemons, and the jobs' processes."""
        spec = self.spec
        if node not in spec.node_names:
            raise DevClusterError(
                f"node must be one of {', '.join(spec.node_names)}, but is {node!r}"
            )
        found = [p for p in job_processes(self.layout) if p.node == node]
        return NodeProcesses(
            slurmd=self._running(spec)[node_daemon_name(node)],
            step_daemons=tuple(p for p in found if isinstance(p, StepDaemon)),
            tasks=tuple(p for p in found if isinstance(p, Task)),
        )

    @property
    def spec(self) -> ClusterSpec:
        """Return the spec of the last start; raise if it never started."""
        spec = load(self.layout)
        if spec is None:
            raise DevClusterError(
                f"there is no cluster {self.name!r} in {self.state.parent}; "
                f"`python -m slurm up --name {self.name}` makes it"
            )
        return spec

    def _running(self, spec: ClusterSpec | None) -> dict[str, int | None]:
        if spec is None:
            return {}
        every = daemons(spec, self.layout)
        return {name: processes.running_pid(daemon) for name, daemon in every.items()}

    def _refuse_changes(self, spec: ClusterSpec) -> None:
        """Refuse to treat a running cluster of another shape as the requested one."""
        if self._shape != spec.shape:
            raise DevClusterError(
                f"cluster {self.name!r} is up as {spec.shape}, but {self._shape} was asked; "
                f"`python -m slurm down --name {self.name}` first, or use another name"
            )
