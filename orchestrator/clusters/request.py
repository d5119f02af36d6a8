"""Values for submissions: a request, and a cluster's answer to it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.slurm_client import clean_environment


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
            sys.executable, "-m", "orchestrator.agent.node", str(self.run),
            "--attempt", str(self.attempt),
        ]  # fmt: skip

    def node_environment(self, index: int, names: Sequence[str], address: str) -> dict[str, str]:
        """Return the environment of node `index`, for `node_command`.

        Args:
            names: of all nodes.
            address: of this one, which the others reach.
        """
        return {
            **clean_environment(os.environ),
            **self.environment,
            "SLURM_JOB_ID": str(os.getpid()),
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
