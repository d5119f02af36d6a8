"""What a failing rank leaves behind, so that the run can say who failed first and why."""

from __future__ import annotations

import sys
import time
import traceback
from typing import Any

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


def failure_of(topology: Topology, error: BaseException) -> dict[str, Any]:
    """What is kept of this rank's failure.

    `secondary`: it failed only because a peer did, or differed.
    """
    others = isinstance(error, ReplicasDiffer) and topology.rank not in error.ranks
    return {
        "rank": topology.rank,
        "node": topology.node,
        "time": time.time(),
        "cause": describe(error),
        "usage": isinstance(error, UsageError),
        "secondary": others or isinstance(error, PeerLost | RanksMissing),
        "exit_code": exit_code(error),
        "traceback": "".join(traceback.format_exception(error)),
    }


def write_failure(run: RunDir, attempt: int, failure: dict[str, Any]) -> None:
    """Into the attempt's folder. Where that is full or gone, it is all in the last word."""
    try:
        write_json(run.failure(attempt, failure["rank"]), failure)
    except OSError as error:
        print(f"the failure could not be recorded: {error}", file=sys.stderr)  # noqa: T201  # the log
