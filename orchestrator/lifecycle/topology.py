"""A rank's identity. The one module that reads the environment in which a rank was started.

SLURM sets these variables; the local cluster sets the same ones for its simulated nodes, so all
code after this treats both alike.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.errors import UsageError
from orchestrator.lifecycle.address import own_address
from orchestrator.slurm_client import own_job_id

PLACE_VARIABLES = {
    "rank": "SLURM_PROCID",
    "size": "SLURM_NTASKS",
    "local_rank": "SLURM_LOCALID",
    "node_index": "SLURM_NODEID",
    "nodes": "SLURM_JOB_NUM_NODES",
}
BASE_ATTEMPT_VARIABLE = "ORCHESTRATOR_BASE_ATTEMPT"
# Node and folder in which the batch script continues with the ranks' copy of the code.
BATCH_COPY_VARIABLE = "ORCHESTRATOR_BATCH_COPY"
COPIES_VARIABLE = "ORCHESTRATOR_COPIES"
"""Each folder whose code was copied at submission, and its copy, as JSON; for programs."""
REPLACES_VARIABLE = "ORCHESTRATOR_REPLACES"
"""How many processes have had this rank's place before, where it takes the place of one."""
OUTER_PATH_VARIABLE = "ORCHESTRATOR_OUTER_PYTHONPATH"
"""PYTHONPATH as it was before ours came first; for programs."""
OUTER_UMASK_VARIABLE = "ORCHESTRATOR_OUTER_UMASK"
"""The person's umask, in octal: what a program writes is as private as they have it."""


def attempt_of(env: Mapping[str, str]) -> int:
    """Return the number of this start among all of the run, where a scheduler starts it."""
    return int(env[BASE_ATTEMPT_VARIABLE]) + int(env.get("SLURM_RESTART_COUNT", "0"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """One rank's place among all ranks.

    Attributes:
        rank, size: this rank's number and how many there are.
        local_rank: its number on its node.
        node_index, nodes: its node's number and how many there are.
        node: the node's name.
        address: an IP address of the node that the other nodes reach.
        job_id: the scheduler's (or the local launcher's) id of the run.
        restarts: how often the scheduler restarted this job.
        replaces: how many processes had this rank before in this attempt.
        base_attempt: the run's attempt that this job's first start was; None without a
            scheduler.
    """

    rank: int
    size: int
    local_rank: int
    node_index: int
    nodes: int
    node: str
    address: str
    job_id: str
    restarts: int = 0
    replaces: int = 0
    base_attempt: int | None = None

    @property
    def scheduled(self) -> bool:
        """Return whether a scheduler placed this rank, and can restart the job by itself."""
        return self.base_attempt is not None

    @property
    def attempt(self) -> int:
        """Return this start's number among all of the run. For scheduled ranks."""
        return (self.base_attempt or 0) + self.restarts

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Topology:
        """Read SLURM's variables. Raises `UsageError` when one is missing or is no number."""

        def number(name: str, default: int | None = None) -> int:
            text = env.get(name)
            if text is None and default is not None:
                return default
            if text is None or not text.isdigit():
                raise UsageError(
                    f"{name} must be set to a number for a worker, but is {text!r}; workers are "
                    f"started by `python -m orchestrator.launch`"
                )
            return int(text)

        node = env.get("SLURMD_NODENAME") or socket.gethostname()
        place = {name: number(variable) for name, variable in PLACE_VARIABLES.items()}
        where = {name: place[name] for name in ("node_index", "nodes")}
        return cls(
            **place,
            node=node,
            address=own_address(env, node=node, **where),
            job_id=own_job_id(env),
            restarts=number("SLURM_RESTART_COUNT", 0),
            replaces=number(REPLACES_VARIABLE, 0),
            base_attempt=(number(BASE_ATTEMPT_VARIABLE) if BASE_ATTEMPT_VARIABLE in env else None),
        )
