"""Where a run stands when nobody can be asked: whose heart beats, runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.lifecycle.signs.heartbeat import BEAT_S, ENDED, read_beat
from orchestrator.outcome.folder_status import DAMAGE, ENDED_STATES, RunStatus, unknown
from orchestrator.run_folder.files import names_in
from orchestrator.run_folder.rundir import RunDir

LOOK_TWICE_S = BEAT_S + 0.5


def by_hearts(runs: Sequence[RunDir], found: dict[Path, RunStatus]) -> None:
    """Fill in where those runs stand that have not ended."""
    runs = [run for run in runs if found[run.path].state not in ENDED_STATES]
    before: dict[Path, list[str]] = {}
    for run in runs:
        try:
            before[run.path] = _beats(run)
        except DAMAGE as error:
            found[run.path] = unknown(run, error)
    if any(before.values()):
        time.sleep(LOOK_TWICE_S)
    for run in runs:
        if run.path not in before:
            continue
        now = _beats(run)
        beating = any(a != b for a, b in zip(now, before[run.path], strict=False) if b != ENDED)
        state = "running" if beating else "unknown"
        found[run.path] = replace(found[run.path], state=state)


def _beats(run: RunDir) -> list[str]:
    folder = run.attempt(max(0, run.attempts_made() - 1))
    return [read_beat(folder / name) for name in names_in(folder) if name.startswith("heartbeat-")]
