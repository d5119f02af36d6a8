"""The seam between a plan and a place to run it: `Cluster`, `Request`, `Handle`.

Two implementations: `local` (pretended nodes on this machine) and `slurm`. Both pass one suite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from orchestrator.config.schema import Config
from orchestrator.outcome.run_state import Culprit, State

__all__ = ["POLL_S", "Cluster", "Culprit", "Handle", "Request", "State"]

POLL_S = 0.1  # how long those who follow a run wait for news of it


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A submission as a value: printable, comparable, with nothing started.

    Attributes:
        run: the run's folder.
        attempt: number of this start.
        nodes, ranks_per_node: its shape.
        environment: what is set for every rank beside the cluster's own variables.
        details: what the cluster adds, for printing (the sbatch script, say).
    """

    run: Path
    attempt: int
    nodes: int
    ranks_per_node: int
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


class Handle(Protocol):
    """A submission under way."""

    def poll(self, timeout_s: float) -> State:
        """Wait up to `timeout_s` for news; give the state."""
        ...

    def stop(self) -> None:
        """Ask all ranks to stop together at the next boundary, with a checkpoint."""
        ...

    def kill(self) -> None:
        """End every process now. Returns when none is left."""
        ...

    @property
    def culprit(self) -> Culprit | None:
        """Who failed first, once the state is FAILED."""
        ...


class Cluster(Protocol):
    """A place to run."""

    def request(self, config: Config, run: Path, attempt: int) -> Request:
        """The submission as a value. Pure. Raises `ClusterError` on what the cluster cannot do."""
        ...

    def submit(self, request: Request) -> Handle:
        """Start it. Raises `ClusterError` when it is refused; nothing is left behind then."""
        ...
