"""A run that is ready to be placed, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.clusters.api import Cluster, Request
from orchestrator.config.schema import Config
from orchestrator.rundir.folder import RunDir
from orchestrator.runs.console import Manner
from orchestrator.runs.interrupts import Interrupts


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """Its folder is written, its lock is held, its signals are counted.

    Attributes:
        attempt: the number of the start that a person asked for.
        request: what its cluster was asked to admit.
    """

    config: Config
    run: RunDir
    cluster: Cluster
    attempt: int
    request: Request
    manner: Manner
    interrupts: Interrupts
