"""A rank's log: its text, as it is or as it grows, and where the log of the culprit is."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from orchestrator.clusters.api import class_of
from orchestrator.errors import RunFolderError
from orchestrator.report.terminal import LogReader, command
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.status import OVER, UNREADABLE, kind_of
from orchestrator.runs.status import statuses


def read_log(
    run: RunDir, rank: int | None, lines: int | None = None, *, follow: bool = False
) -> Iterator[str]:
    """Yield a log's text, or its last lines, made harmless, in bounded memory.

    The log is a rank's, or rank 0's, or before there is one, the batch script's.

    Args:
        follow: yield its growth, too, until the run has ended.

    Raises:
        RunFolderError: the rank has no log; or whether the run that is followed has ended cannot
            be known, since it is damaged or private.
    """
    reader, next_look = LogReader(run.rank_log(rank or 0), lines), 0.0
    while follow:
        yield from reader.read()
        if time.monotonic() >= next_look:
            [status], _ = statuses([run])
            if status.state in UNREADABLE:
                raise RunFolderError(status.reason or f"{run.path} cannot be read")
            if status.state in OVER:
                break
            next_look = time.monotonic() + class_of(kind_of(run)).status_interval_s
        time.sleep(0.2)
    if not os.path.lexists(reader.path):
        if rank is not None:
            known, there = "no rank began", run.ranks_with_logs()
            if there:
                known = f"there are logs of ranks {there[0]} to {there[-1]}"
            raise RunFolderError(f"{run.path} has no log of rank {rank}; {known}")
        reader = LogReader(run.batch_log, lines)
    yield from reader.read()
    yield reader.rest()


def pointer_to_culprit(run: RunDir, rank: int | None) -> str | None:
    """Return a sentence on where the log of the rank that failed first is; None if it is the log
    of `rank` (of rank 0 by default).
    """
    culprit = (run.read_result() or {}).get("culprit") or {}
    first = culprit.get("rank")
    if first is None or first == (rank or 0) or not run.rank_log(first).exists():
        return None
    return f"rank {first} failed first; its log: {command('logs', run.path)} --rank {first}"
