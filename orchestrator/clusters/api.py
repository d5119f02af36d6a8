"""The seam between a plan and a place to run it: `Cluster`, `Request`, `Handle`.

Ours are `local` (simulated nodes on this machine) and `slurm`; anybody's is one class in a package
of their own (see `plugins.py`). Whoever starts,
follows or ends a run knows it by these classes alone.
"""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from orchestrator.clusters.request import Admission, Request, Share
from orchestrator.config.reading import NoOptions, options_of
from orchestrator.config.rules import Survival, planned_survival, with_survival
from orchestrator.config.schema import Config, node_range
from orchestrator.errors import ClusterError
from orchestrator.plan.plan import Plan
from orchestrator.plugins import CLUSTERS
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.lock import is_held, signal_holder
from orchestrator.rundir.outcome import Culprit, State, describe_stop
from orchestrator.rundir.status import ENDED_STATES, RunStatus, has_begun, status_or_damage

__all__ = ["POLL_S", "Admission", "Cluster", "Culprit", "Handle", "Request", "Share", "State"]

POLL_S = 0.1  # how long those who follow a run wait for news of it


class Handle(ABC):
    """A submission under way.

    Attributes:
        culprit: who failed first, once the state is FAILED.
        title: what people know it by.
    """

    culprit: Culprit | None = None
    title: str = "the run"

    @property
    def waiting_for(self) -> str:
        """Why it has not begun; "" once it has, or where that is not known."""
        return ""

    @abstractmethod
    def poll(self, timeout_s: float) -> State:
        """Wait up to `timeout_s` for news; give the state."""

    @abstractmethod
    def stop(self) -> None:
        """Ask all ranks to stop, each kind of run in its way; see `describe_stop`."""

    @abstractmethod
    def kill(self) -> None:
        """End every process now. Returns when none is left."""

    def cancel(self, run: RunDir, *, now: bool) -> str:
        """For somebody at another shell: `stop`, or `kill` when `now`; says what happens.

        Raises `ClusterError` when there is nothing to stop.
        """
        if now:
            self.kill()
            return f"every process of {self.title} is being ended"
        how = describe_stop(run)  # as long as it goes on
        self.stop()
        return f"{self.title} {how}"

    def news(self) -> Sequence[str]:
        """What there is to say since the last time, and that the run's folder does not show."""
        return ()

    def in_progress(self) -> str:
        """What it is and does, while it waits or runs: "job 7, running"; "" once it is over."""
        return ""

    def close(self) -> None:  # most have nothing to close
        """Nobody follows it any more from here."""


class Cluster(ABC):
    """A place to run.

    What it makes of a configuration are methods; what it makes of a run that is there already, from
    its folder alone, are methods of the class: that may be long after, and in another shell.

    Attributes:
        attended: the launcher holds the run and shows it to its end; with it the run ends, too.
            Otherwise `submit` writes handle.json with a `kind`, `job_id` and `attempt`, the run
            goes on alone, and `handle` finds it again.
        look_every_s: the least time between two calls of `look` by one command.
        Options: a dataclass of what `cluster.options` may hold, for this kind of cluster alone.
    """

    attended: ClassVar[bool] = True
    look_every_s: ClassVar[float] = 1.0
    Options: ClassVar[type] = NoOptions

    def __init__(self, config: Config, tell: Callable[[str], None] = lambda _: None) -> None:
        """Raises `ConfigError` for what this kind of cluster cannot do.

        Args:
            tell: says a sentence to whoever waits.
        """
        self.config, self.tell = config, tell
        self.options = options_of(self.Options, config.cluster.options, "cluster.options")

    @cached_property
    def survival(self) -> Survival:
        """Whether ranks go on there without those that are lost. Raises `JobError` for no job."""
        return planned_survival(self.config)

    @property
    def decided(self) -> Config:
        """The configuration, with `run.survive` as it will be."""
        return with_survival(self.config, on=self.survival.on)

    def refuse(self, plan: Plan, framework: str | None) -> None:  # nothing, by default
        """Raise a `UsageError` for a plan that could never run there; nothing is asked for it."""

    def trust(self, run: RunDir, typed: Collection[str] | None = None) -> None:  # likewise
        """Use nothing that only the run's folder vouches for. Raises `ClusterError`.

        Args:
            typed: keys that the person at this shell has set; None: all of them.
        """

    def request(self, run: Path, attempt: int) -> Request:
        """The submission as a value. Pure. Raises `ClusterError` on what the cluster cannot do."""
        asked = self.config.cluster
        threads = str(asked.cpus_per_rank)
        return Request(
            run=run,
            attempt=attempt,
            nodes=node_range(asked.nodes)[1],
            ranks_per_node=asked.ranks_per_node,
            environment={
                "OMP_NUM_THREADS": threads,
                "MKL_NUM_THREADS": threads,
                **asked.environment,
            },
        )

    def check(self, request: Request) -> Admission:
        """Ask the place itself, before anything is written. Raises `ClusterError`."""
        del request
        return Admission()

    @abstractmethod
    def submit(self, request: Request) -> Handle:
        """Start it. Raises `ClusterError` when it is refused; nothing is left behind then."""

    @property
    def placed(self) -> dict[str, Any]:
        """What submission.json says of it: `cluster`, its kind, and whether its runs are `held`."""
        return {"cluster": self.config.cluster.kind, "held": self.attended}

    @property
    def share(self) -> Share | None:
        """What a run takes of this machine; None: it cannot have another one beside it here."""
        return None

    @classmethod
    def chosen(cls, config: Config) -> type[Cluster]:
        """The class that serves a configuration, where not all of a kind is one."""
        del config
        return cls

    @classmethod
    def submit_all(
        cls, placed: Sequence[tuple[Cluster, Request]], at_once: int | None = None
    ) -> None:
        """Start many runs, as the points of a sweep are; each then has its handle.json.

        Args:
            at_once: the most that are to run at the same time; None: as many as the place likes.

        Raises:
            ClusterError: the rest is refused, or does not fit; runs with a handle.json go on. Or
                the cluster does not support `at_once`.
        """
        if at_once is not None:
            raise ClusterError(f"{cls.__name__} cannot bound how many runs it runs at once")
        for cluster, request in placed:
            cluster.submit(request)

    @classmethod
    def foresee_all(cls, placed: Sequence[tuple[Cluster, Request]], most: int | None) -> list[str]:
        """What to know before `submit_all`, which this raises like, as sentences."""
        del placed, most
        return []

    @classmethod
    def adopt(cls, folder: RunDir) -> str:
        """Finish what a command was about that was ended while it submitted.

        Args:
            folder: a run's, or a sweep's, with a submitting.json. A kind of cluster whose `submit`
                writes one finds out here what became of it.

        Returns:
            What was found out, as a sentence; "" where another has done it meanwhile.

        Raises:
            ClusterError: it cannot be known yet.
        """
        raise ClusterError(f"{folder.submitting}: {cls.__name__} does not know such a file")

    @classmethod
    def handle(cls, run: RunDir) -> Handle:
        """A run that was placed here, found again."""
        return Held(run)

    @classmethod
    def cancel_all(cls, runs: Sequence[RunDir], *, now: bool) -> dict[Path, str]:
        """Stop runs at their next boundaries, or at once, as `Handle.cancel` does.

        Returns:
            What happens to each, as said of it ("stops at …"). Those that are over are left out.
        """
        found: dict[Path, str] = {}
        for run in runs:
            handle = cls.handle(run)
            said = handle.cancel(run, now=now)
            found[run.path] = said.removeprefix(f"{handle.title} ").removeprefix(f"{run.path} ")
        return found

    @classmethod
    def look(cls, runs: Sequence[RunDir], found: dict[Path, RunStatus]) -> Iterator[str]:
        """Fill in where runs stand that go on alone; yields what could not be found out.

        One after another; a cluster that can be asked about many at once says so here.

        Args:
            found: what their folders alone say, by `run.path`.
        """
        for run in runs:
            found[run.path] = status_or_damage(run, partial(cls._look, run, found[run.path]))
        yield from ()

    @classmethod
    def _look(cls, run: RunDir, status: RunStatus) -> RunStatus:
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


class Held(Handle):
    """A run that another process holds: its launcher."""

    def __init__(self, run: RunDir) -> None:
        self._run = run

    def poll(self, timeout_s: float) -> State:
        if is_held(self._run):
            time.sleep(timeout_s)
            return State.RUNNING
        result = self._run.read_result()
        return State(result["state"]) if result else State.FAILED

    def stop(self) -> None:
        signal_holder(self._run, signal.SIGINT)

    def kill(self) -> None:
        # two of different kinds, so that both are delivered
        signal_holder(self._run, signal.SIGINT, signal.SIGTERM)

    def cancel(self, run: RunDir, *, now: bool) -> str:
        return super().cancel(run, now=now).replace(self.title, str(run.path), 1)


def cluster_of(config: Config, tell: Callable[[str], None] = lambda _: None) -> Cluster:
    """The cluster that `cluster.kind` names. Raises `ConfigError`."""
    chosen = class_for(config)
    with CLUSTERS.wrap_errors(config.cluster.kind, "at its start"):
        return chosen(config, tell)


def class_for(config: Config) -> type[Cluster]:
    """What serves a configuration. Raises `ConfigError` where it is not installed."""
    return class_of(config.cluster.kind).chosen(config)


def class_of(kind: str) -> type[Cluster]:
    """What a kind of cluster is. Raises `ConfigError` where it is not installed."""
    return CLUSTERS.load(kind, Cluster)
