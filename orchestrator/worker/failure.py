"""What a failing rank leaves behind, so that the run can say who failed first and why."""

from __future__ import annotations

import time
import traceback
from pathlib import Path

from orchestrator.errors import (
    EXIT_FAILED,
    OrchestratorError,
    PeerLost,
    RanksMissing,
    ReplicasDiffer,
    UsageError,
)
from orchestrator.rundir import RunDir, write_json
from orchestrator.worker.topology import Topology


def describe(error: BaseException) -> str:
    """The cause in one line or a few: our own errors as they are, others with their type's name."""
    text = str(error)
    if isinstance(error, OrchestratorError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def exit_code(error: BaseException) -> int:
    return error.exit_code if isinstance(error, OrchestratorError) else EXIT_FAILED


def record_failure(run: RunDir, attempt: int, topology: Topology, error: BaseException) -> Path:
    """Write this rank's failure. `secondary`: it failed only because a peer did, or differed."""
    others = isinstance(error, ReplicasDiffer) and topology.rank not in error.ranks
    path = run.failure(attempt, topology.rank)
    write_json(
        path,
        {
            "rank": topology.rank,
            "node": topology.node,
            "time": time.time(),
            "cause": describe(error),
            "usage": isinstance(error, UsageError),
            "secondary": others or isinstance(error, PeerLost | RanksMissing),
            "exit_code": exit_code(error),
            "traceback": "".join(traceback.format_exception(error)),
        },
    )
    return path
