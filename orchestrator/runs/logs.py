"""A run's logs, read or followed from another shell, wherever it runs."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from orchestrator.clusters.api import Handle
from orchestrator.errors import ClusterError, ConfigError, RunFolderError
from orchestrator.report.status_tables import UNREADABLE
from orchestrator.report.terminal import HarmlessStream
from orchestrator.rundir.files import blocks, start_of_last
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.status import OVER
from orchestrator.runs.found_again import handle_of
from orchestrator.runs.status import statuses

FOLLOW_S = 0.2
LOOK_S = 2.0


def log_of(run: RunDir, rank: int | None) -> Path:
    """The log to show: a rank's, or rank 0's, or before there is one, the batch script's.

    Raises:
        RunFolderError: the rank has no log.
    """
    path = run.rank_log(rank or 0)
    if os.path.lexists(path):
        return path
    if rank is not None:
        there = run.ranks_with_logs()
        known = f"there are logs of ranks {there[0]} to {there[-1]}" if there else "no rank began"
        raise RunFolderError(f"{run.path} has no log of rank {rank}; {known}")
    return run.batch_log if run.batch_log.exists() else path


def text_of(path: Path, lines: int | None = None) -> Iterator[str]:
    """A log's text, or its last lines, made harmless, in bounded memory; nothing when there is no
    such file.
    """
    harmless = HarmlessStream()
    try:
        for block in blocks(path, 0 if lines is None else start_of_last(path, lines)):
            yield harmless.feed(block)
    except FileNotFoundError:
        return
    yield harmless.rest()


def follow(run: RunDir, rank: int | None, lines: int | None = None) -> Iterator[str]:
    """A log's text, or its last lines, and what follows as it grows, made harmless, until the run
    has ended.

    Raises:
        RunFolderError: whether it has ended cannot be known, since it is damaged or private.
    """
    offset, path, standing = 0, None, _Standing(run)
    harmless = HarmlessStream()
    while True:
        current = run.rank_log(rank or 0)
        if path is None and current.exists():
            path = current
            offset = 0 if lines is None else start_of_last(path, lines)
        if path is not None:
            for content in blocks(path, offset):
                offset += len(content)
                yield harmless.feed(content)
        if standing.over:
            yield harmless.rest()
            return
        standing.look()
        if path is None and standing.news:
            sys.stderr.write(f"pending ({standing.news})\n")


class _Standing:
    """Whether a run is over, asked of its cluster no more often than watchers may."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._handle: Handle | None = None
        self._next, self._said = 0.0, ""
        self.over, self.news = False, ""
        with contextlib.suppress(ClusterError, ConfigError):  # not here: the folder has to tell
            self._handle = handle_of(run)

    def look(self) -> None:
        """Wait a moment; `news` is then why it is pending, where that was not told before."""
        self.news = ""
        try:
            if self._handle is not None:
                self.over = self._handle.poll(FOLLOW_S).ended
                self._tell(self._handle.waiting_for)
                return
        except ClusterError:
            self._handle = None
        time.sleep(FOLLOW_S)
        if time.monotonic() >= self._next:
            [status], _ = statuses([self._run])
            if status.state in UNREADABLE:
                raise RunFolderError(status.reason or f"{self._run.path} cannot be read")
            self.over = status.state in OVER
            self._next = time.monotonic() + LOOK_S

    def _tell(self, reason: str) -> None:
        if reason != self._said:
            self._said = self.news = reason
