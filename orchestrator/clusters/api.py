"""The interface between a plan and a place to run it: `Cluster`, `Request`, `Handle`.

Built in are `local` (simulated nodes on this machine) and `slurm`; a third party's is one class in
its own package (see `plugins.py`). Code that starts, follows or ends a run uses these classes only.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from orchestrator.config.reading import NoOptions, options_of
from orchestrator.config.rules import ClusterFacts, planned_survival, with_survival
from orchestrator.config.schema import ClusterConfig, Config, node_range
from orchestrator.errors import ClusterError
from orchestrator.interrupt import STOP_REQUEST
from orchestrator.plugins import CLUSTERS
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.lock import is_locked, signal_holder
from orchestrator.rundir.outcome import Culprit, State, describe_stop
from orchestrator.rundir.status import ENDED_STATES, RunStatus, has_begun, status_or_damage

__all__ = ["POLL_S", "Admission", "Cluster", "Culprit", "Handle", "Request", "Share", "State"]

POLL_S = 0.1  # interval at which followers of a run poll


FOREIGN_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "SUBMITIT_")
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def rank_environment(cluster: ClusterConfig) -> dict[str, str]:
    """Return the variables that ranks get besides those of the shell: their number of threads, and
    what `cluster.environment` sets, which comes first.
    """
    threads = str(cluster.cpus_per_rank)
    return {**dict.fromkeys(THREAD_VARIABLES, threads), **cluster.environment}


def clean_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables of another scheduler or launcher."""
    return {k: v for k, v in env.items() if not k.startswith(FOREIGN_PREFIXES) and k not in FOREIGN}


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A submission as a value: printable, comparable, with nothing started.

    Attributes:
        run: the run's folder.
        attempt: number of this start.
        nodes, ranks_per_node: its shape.
        environment: variables of every rank besides the cluster's own.
        text: the exact submitted text, if there is one (the batch script).
        details: the cluster's own additions, also for printing as JSON.
    """

    run: Path
    attempt: int
    nodes: int
    ranks_per_node: int
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    text: str = ""
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def node_command(self) -> list[str]:
        """Return the command to start once on each node, with the node's environment.

        It starts the node's ranks, and ends when the attempt is over; SIGTERM asks for a stop.
        `rundir.outcome.read_outcome` then gives the attempt's outcome.
        """
        return [
            sys.executable,
            "-m",
            "orchestrator.agent.node",
            str(self.run),
            "--attempt",
            str(self.attempt),
        ]

    def node_environment(self, index: int, names: Sequence[str], address: str) -> dict[str, str]:
        """Return the environment of node `index`, for `node_command`.

        Args:
            names: of all nodes.
            address: of this one, which the others reach.
        """
        return {
            **clean_environment(os.environ),
            **self.environment,
            "SLURM_JOB_ID": str(os.getpid()),  # of no job (`topology.py`)
            "SLURM_JOB_NUM_NODES": str(self.nodes),
            "SLURM_NNODES": str(self.nodes),
            "SLURM_NTASKS": str(self.ranks),
            "SLURM_NTASKS_PER_NODE": str(self.ranks_per_node),
            "SLURM_NODEID": str(index),
            "SLURMD_NODENAME": names[index],
            "SLURM_JOB_NODELIST": ",".join(names),
            "SLURM_SUBMIT_DIR": str(Path.cwd()),
            "ORCHESTRATOR_NODE_ADDRESS": address,
            **({"SLURM_RESTART_COUNT": str(self.attempt)} if self.attempt else {}),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """A cluster's answer to a request that it accepts.

    Attributes:
        message: for people.
        warnings: what may delay it, or hurt it later; a sentence each.
        notice: joins submission.json, for the ranks.
    """

    message: str = ""
    warnings: tuple[str, ...] = ()
    notice: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The part of this machine that a run uses.

    Attributes:
        ranks: processes that compute, each with its own memory.
        cores: of them all.
        gpus: used if there are as many; otherwise it computes without.
    """

    ranks: int
    cores: int
    gpus: int


class Handle(ABC):
    """A submission in progress.

    Attributes:
        culprit: who failed first, once the state is FAILED.
        title: its name for people.
    """

    culprit: Culprit | None = None
    title: str = "the run"

    @property
    def waiting_for(self) -> str:
        """Return why it has not begun; "" once it has, or if that is not known."""
        return ""

    @abstractmethod
    def poll(self, timeout_s: float) -> State:
        """Wait up to `timeout_s` for a change; return the state."""

    @abstractmethod
    def stop(self) -> None:
        """Ask all ranks to stop, as each kind of run does; see `describe_stop`."""

    @abstractmethod
    def kill(self) -> None:
        """End every process now. Return when none is left."""

    def cancel(self, run: RunDir, *, now: bool) -> str:
        """Stop the run from another shell, or `kill` it when `now`; return a description.

        Raises `ClusterError` when there is nothing to stop.
        """
        return f"{self.title} {self.request_end(run, now=now)}"

    def request_end(self, run: RunDir, *, now: bool) -> str:
        """Do what `cancel` does; return a clause on what happens to the run: "stops at …"."""
        if now:
            self.kill()
            return "is being ended, with every process of it"
        how = describe_stop(run)  # while it still runs
        self.stop()
        return how

    def new_messages(self) -> Sequence[str]:
        """Return new messages that the run's folder does not show."""
        return ()

    def in_progress(self) -> str:
        """Describe a waiting or running submission, as "job 7, running"; "" once it is over."""
        return ""


class Cluster(ClusterFacts, ABC):
    """A place to run.

    Methods of the object use a configuration. Methods of the class use an existing run's folder
    alone: they may be called much later, and in another shell.

    Attributes:
        attended: the launcher holds the run and shows it to its end; both end together.
            Otherwise `submit` writes handle.json with a `kind`, `job_id` and `attempt`, the run
            continues alone, and `handle` finds it again.
        status_interval_s: the least time between two calls of `update_statuses` by one command.
        Options: a dataclass of the valid `cluster.options` of this kind of cluster.
        supports_survival: see `ClusterFacts`.
    """

    attended: ClassVar[bool] = True
    status_interval_s: ClassVar[float] = 1.0
    Options: ClassVar[type] = NoOptions

    def __init__(self, config: Config, tell: Callable[[str], None] = lambda _: None) -> None:
        """Raise `ConfigError` for settings that this kind of cluster does not support.

        Args:
            tell: called with a sentence for the waiting user.
        """
        self.config, self.tell = config, tell
        self.options = options_of(self.Options, config.cluster.options, "cluster.options")

    @cached_property
    def survives(self) -> bool:
        """Return whether ranks survive the loss of others there. Raises `JobError` for no job."""
        return planned_survival(self.config).on

    @property
    def survival_line(self) -> str:
        """Return a line about `run.survive`, perhaps "". Raises `JobError` for no job."""
        return planned_survival(self.config).line

    @property
    def decided(self) -> Config:
        """Return the configuration with the effective `run.survive`."""
        return with_survival(self.config, on=self.survives)

    def refuse(self, framework: str | None) -> None:  # nothing, by default
        """Raise a `UsageError` for a run that could never run there; contacts nothing."""

    def trust(self, run: RunDir, typed: Collection[str] | None = None) -> None:  # no check
        """Refuse settings of the run's folder that this user has not approved.

        Raises `ClusterError`.

        Args:
            typed: keys that the user has set in this command; None: all of them.
        """

    def request(self, run: Path, attempt: int) -> Request:
        """Return the submission as a value. Pure. Raises `ClusterError` if it is not possible."""
        cluster = self.config.cluster
        return Request(
            run=run,
            attempt=attempt,
            nodes=node_range(cluster.nodes)[1],
            ranks_per_node=cluster.ranks_per_node,
            environment=rank_environment(cluster),
        )

    def check(self, request: Request) -> Admission:
        """Ask the cluster itself, before anything is written. Raises `ClusterError`."""
        del request
        return Admission()

    @abstractmethod
    def submit(self, request: Request) -> Handle:
        """Start it. Raises `ClusterError` when it is refused; nothing is left behind then."""

    @property
    def placed(self) -> dict[str, Any]:
        """Return submission.json's entries on the cluster: its kind, and whether `attended`."""
        return {"cluster": self.config.cluster.kind, "attended": self.attended}

    @property
    def share(self) -> Share | None:
        """Return the part of this machine that a run uses; None: runs cannot share it."""
        return None

    @classmethod
    def chosen(cls, config: Config) -> type[Cluster]:
        """Return the class that serves a configuration, if a kind has several."""
        del config
        return cls

    @classmethod
    def submit_all(
        cls, placed: Sequence[tuple[Cluster, Request]], at_once: int | None = None
    ) -> None:
        """Start many runs, as a sweep's points; each then has its handle.json.

        Args:
            at_once: the most that may run at the same time; None: no limit.

        Raises:
            ClusterError: the rest is refused, or does not fit; runs with a handle.json continue. Or
                the cluster does not support `at_once`.
        """
        if at_once is not None:
            raise ClusterError(f"{cls.__name__} cannot bound how many runs it runs at once")
        for cluster, request in placed:
            cluster.submit(request)

    @classmethod
    def predict_submit_all(cls, placed: Sequence[tuple[Cluster, Request]]) -> list[str]:
        """Return warnings on what `submit_all` would do, as sentences; raises like it."""
        del placed
        return []

    @classmethod
    def adopt(cls, folder: RunDir) -> str:
        """Complete the work of a command that was ended while it submitted.

        Args:
            folder: a run's, or a sweep's, with a submitting.json. A kind of cluster whose `submit`
                writes one resolves it here.

        Returns:
            The result, as a sentence; "" if another process has resolved it meanwhile.

        Raises:
            ClusterError: it cannot be known yet.
        """
        raise ClusterError(f"{folder.submitting}: {cls.__name__} does not know such a file")

    @classmethod
    def handle(cls, run: RunDir) -> Handle:
        """Return the handle of a run that was placed here."""
        return LauncherHandle(run)

    @classmethod
    def cancel_all(cls, runs: Sequence[RunDir], *, now: bool) -> dict[Path, str]:
        """Stop runs at their next boundaries, or at once, as `Handle.cancel` does.

        Returns:
            What happens to each, as a clause ("stops at …"), without runs that are over.
        """
        return {run.path: cls.handle(run).request_end(run, now=now) for run in runs}

    @classmethod
    def update_statuses(
        cls, runs: Sequence[RunDir], statuses: dict[Path, RunStatus]
    ) -> Iterator[str]:
        """Fill in the status of runs that continue alone; yield sentences about failed queries.

        Queries runs one by one; a cluster that can be queried for many at once overrides this.

        Args:
            statuses: the status by the folders alone, by `run.path`.
        """
        for run in runs:
            statuses[run.path] = status_or_damage(
                run, partial(cls._status_of, run, statuses[run.path])
            )
        yield from ()

    @classmethod
    def _status_of(cls, run: RunDir, status: RunStatus) -> RunStatus:
        if status.state in ENDED_STATES:
            return status
        handle = cls.handle(run)
        state = handle.poll(0.0)
        if not state.ended:
            starting = "running" if has_begun(run, status) else "starting"
            name = "pending" if state is State.PENDING else starting
            return replace(status, state=name, reason=handle.waiting_for or None)
        why = handle.culprit.cause if handle.culprit else "it has ended without a result"
        return replace(status, state=state.value if handle.culprit else "lost", reason=why)


class LauncherHandle(Handle):
    """Handle of a run whose launcher, another process, holds its lock: it is asked to stop, or to
    end its processes, and `kill` does not wait for that.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run

    def poll(self, timeout_s: float) -> State:
        if is_locked(self._run):
            time.sleep(timeout_s)
            return State.RUNNING
        result = self._run.read_result()
        return State(result["state"]) if result else State.FAILED

    def stop(self) -> None:
        signal_holder(self._run, STOP_REQUEST)

    def kill(self) -> None:
        # two signals of different kinds, so that both are delivered
        signal_holder(self._run, signal.SIGINT, signal.SIGTERM)

    def cancel(self, run: RunDir, *, now: bool) -> str:
        return f"{run.path} {self.request_end(run, now=now)}"


def cluster_of(config: Config, tell: Callable[[str], None] = lambda _: None) -> Cluster:
    """Return the cluster that `cluster.kind` names. Raises `ConfigError`."""
    chosen = class_for(config)
    with CLUSTERS.wrap_errors(config.cluster.kind, "at its start"):
        return chosen(config, tell)


def class_for(config: Config) -> type[Cluster]:
    """Return the class that serves a configuration. Raises `ConfigError` if it is not installed."""
    return class_of(config.cluster.kind).chosen(config)


def class_of(kind: str) -> type[Cluster]:
    """Return the class of a kind of cluster. Raises `ConfigError` if it is not installed."""
    return CLUSTERS.load(kind, Cluster)
