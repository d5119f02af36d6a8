"""Who failed first, and why: from the exit statuses, what the ranks wrote down, and their logs."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.rundir import RunDir
from orchestrator.submit.api import Culprit

TAIL_LINES = 30
TAIL_BYTES = 64 * 1024
LAST_WORD = "error: "
"""How the log of a rank ends whose main thread was stuck in the framework and could not fail."""


def tail(path: Path, lines: int = TAIL_LINES) -> tuple[str, ...]:
    """The last lines of a text file; none when there is no such file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ()
    return tuple(text.splitlines()[-lines:])


def describe_status(status: int) -> str:
    """An exit status in words.

    >>> describe_status(-9), describe_status(5)
    ('killed by signal 9 (SIGKILL)', 'exited with code 5')
    """
    if status < 0:
        try:
            name = f" ({signal.Signals(-status).name})"
        except ValueError:
            name = ""
        return f"killed by signal {-status}{name}"
    return f"exited with code {status}"


def blame(run: RunDir, attempt: int, node: str, rank: int | None, status: int) -> Culprit:
    """The culprit of a failed attempt.

    Args:
        node, rank, status: who was seen to end first; rank None when the node itself went away.

    A rank that was killed wrote nothing, and its peers fail an instant later because of it: those
    failures are marked secondary. So the one seen first is blamed, unless its own failure is
    secondary and another rank's is not.
    """
    failures = {f["rank"]: f for f in run.failures(attempt)}
    own = failures.get(rank) if rank is not None else None
    if own is not None and own["secondary"]:
        primary = [f for f in failures.values() if not f["secondary"]]
        if primary:
            own = min(primary, key=lambda f: f["time"])
    if own is not None:
        return _from_failure(run, own)
    if rank is None:
        cause = f"the node went away: its supervisor was {describe_status(status)}"
        return Culprit(rank=None, node=node, cause=cause, log_tail=tail(run.node_log(node)))
    log = tail(run.rank_log(rank)) or tail(run.node_log(node))
    cause = describe_status(status)
    if status > 0 and log and log[-1].startswith(LAST_WORD):  # it could say no more than that
        cause = log[-1].removeprefix(LAST_WORD)
    return Culprit(rank=rank, node=node, cause=cause, log_tail=log)


def _from_failure(run: RunDir, failure: Mapping[str, Any]) -> Culprit:
    return Culprit(
        rank=failure["rank"],
        node=failure["node"],
        cause=failure["cause"],
        log_tail=tail(run.rank_log(failure["rank"])),
        usage=failure["usage"],
    )
