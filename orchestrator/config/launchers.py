"""Program styles (`job.style`): the variables from which a program learns its rank.

A style sets those of another tool's launcher (torchrun, msrun), after which its class is named.
Elsewhere a launcher is the process of `orchestrator.launch` that starts and holds a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from orchestrator.plugins import PROGRAM_STYLES


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramRank:
    """One start of a rank's program.

    Attributes:
        rank, size: this rank, and how many there are.
        local_rank, local_size: its number on its node, and how many ranks that node has.
        node_index, nodes: its node, and how many there are.
        owns_device: the rank sees one device, its own, instead of all of its node.
        address, port: where the ranks meet.
        timeout_s: for the ranks to meet.
        run_id: of the run, the same for all attempts.
        attempt, most_restarts: its number, and how often the run may begin again.
        error_file: where the program may describe what ended it.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_index: int
    nodes: int
    owns_device: bool
    address: str
    port: int
    timeout_s: float
    run_id: str
    attempt: int
    most_restarts: int
    error_file: Path


class Launcher:
    """Base class of program styles.

    A third party's is found through the entry points `orchestrator.launchers`. Its module is
    imported by agents and where plans are printed, so it must not import a framework.

    Attributes:
        title: the program whose variables it sets.
        forms_group: the ranks meet at a port, and see no variables of the scheduler's own ranks.
        rank_0_listens: rank 0's program opens that port; else `serve` does.
        device_variable: names the devices that a rank sees.
    """

    title: ClassVar[str] = ""
    forms_group: ClassVar[bool] = True
    rank_0_listens: ClassVar[bool] = True
    device_variable: ClassVar[str] = "CUDA_VISIBLE_DEVICES"

    def serve(self, address: str, ranks: int, timeout_s: float) -> tuple[int, Callable[[], None]]:
        """Start what the ranks connect to, on the first node; return its port, and how to end it.

        Args:
            timeout_s: for the ranks to meet.
        """
        raise NotImplementedError

    def variables(self, start: ProgramRank) -> dict[str, str]:
        """Return the variables that tell a program its rank, in a group."""
        del start
        return {}


class Plain(Launcher):
    """The scheduler's own variables: the ranks form no group."""

    title = "the scheduler"
    forms_group = False


class Torchrun(Launcher):
    """Variables that torch's local_elastic_agent.py sets."""

    title = "torchrun"

    def variables(self, start: ProgramRank) -> dict[str, str]:
        return {
            "LOCAL_RANK": "0" if start.owns_device else str(start.local_rank),
            "RANK": str(start.rank),
            "GROUP_RANK": str(start.node_index),
            "ROLE_RANK": str(start.rank),
            "ROLE_NAME": "default",
            "LOCAL_WORLD_SIZE": str(start.local_size),
            "WORLD_SIZE": str(start.size),
            "GROUP_WORLD_SIZE": str(start.nodes),
            "ROLE_WORLD_SIZE": str(start.size),
            "MASTER_ADDR": start.address,
            "MASTER_PORT": str(start.port),
            "TORCHELASTIC_RESTART_COUNT": str(start.attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(max(start.attempt, start.most_restarts)),
            "TORCHELASTIC_RUN_ID": start.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCHELASTIC_ERROR_FILE": str(start.error_file),
        }


def program_style(name: str) -> Launcher:
    """Return the program style of a `job.style`. Raises `ConfigError` if there is none."""
    return PROGRAM_STYLES.make(name, Launcher)
