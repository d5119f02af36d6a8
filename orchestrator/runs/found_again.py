"""Runs as their clusters find them again, whatever befell the command that submitted them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.clusters.api import Handle, Held, class_of
from orchestrator.errors import ClusterError, RunFolderError
from orchestrator.rundir.files import read_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.status import kind_of

NOBODY_KNOWS = "; see for yourself whether the job that it is about is queued, then remove the file"


def settle_submissions(runs: Sequence[RunDir]) -> tuple[list[str], dict[Path, str]]:
    """Find out what became of submissions that were cut short.

    Returns:
        What was found out, as sentences; and for each run of which it cannot be known yet whether
        it was submitted, why.
    """
    folders = dict.fromkeys(place for run in runs for place in (run.path, run.path.parent))
    sentences: list[str] = []
    unknown: dict[Path, str] = {}
    for folder in map(RunDir, folders):
        if not os.path.lexists(folder.submitting):  # nor where one may not look
            continue
        members = [run for run in runs if folder.path in (run.path, run.path.parent)]
        try:
            sentences.append(class_of(kind_of(members[0])).adopt(folder))
        except (ClusterError, RunFolderError) as error:
            damaged = isinstance(error, RunFolderError)
            why = f"{error}{NOBODY_KNOWS if damaged else ''}"
            unknown |= {run.path: why for run in members if _is_about(folder, run.path)}
    return [sentence for sentence in sentences if sentence], unknown


def _is_about(folder: RunDir, run: Path) -> bool:
    """Whether what is being submitted there may be this run; so it is where that is not known."""
    try:
        note: dict[str, Any] = read_json(folder.submitting, checked=True) or {}
    except RunFolderError:
        return True
    return run == folder.path or run.name in note.get("elements", (run.name,))


def handle_of(run: RunDir) -> Handle:
    """A run as its cluster finds it again; one that was never handed to any has a launcher.

    Raises:
        ClusterError: it is being submitted, or may have been, and nobody answers.
    """
    _, unknown = settle_submissions([run])
    for why in unknown.values():
        raise ClusterError(why)
    return class_of(kind_of(run)).handle(run) if run.handle.exists() else Held(run)
