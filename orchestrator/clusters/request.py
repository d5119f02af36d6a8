"""A submission as a value, with nothing started, and what a cluster says of it."""

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
        environment: what is set for every rank beside the cluster's own variables.
        text: what is handed over, word by word, where that is a text (the batch script).
        details: what the cluster adds, for itself and for printing as JSON.
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
        """The command to start once on each node, with the node's environment.

        It starts the node's ranks, and ends when the attempt is over; SIGTERM asks for a stop.
        `rundir.outcome.read_outcome` then says how the attempt ended.
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
    """What a cluster says of a request that it takes.

    Attributes:
        words: for people.
        warnings: what may keep it waiting, or hurt it later; a sentence each.
        notice: joins submission.json, for the ranks.
    """

    words: str = ""
    warnings: tuple[str, ...] = ()
    notice: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What a run takes of this machine.

    Attributes:
        ranks: processes that compute, each with memory of its own.
        cores: of them all.
        gpus: that it uses where there are as many; otherwise it computes without.
    """

    ranks: int
    cores: int
    gpus: int
