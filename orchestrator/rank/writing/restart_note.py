"""Why an attempt was needed, and what was lost of the one before it."""

from __future__ import annotations

from orchestrator.lifecycle.stopping.departure import why_restarted
from orchestrator.lifecycle.topology import Topology
from orchestrator.rundir.folder import RESUMED, RunDir
from orchestrator.rundir.metrics import read_progress

NO_WORD = "it ended without a word: a node failed, or the time to stop was too short"


def restart_note(run: RunDir, attempt: int, topology: Topology, updates: int) -> dict[str, object]:
    """The content of restart.json, for an attempt that begins after `updates` updates."""
    queued = topology.scheduled and not run.read_submission().get("held")
    why = RESUMED
    if topology.restarts or not queued:  # else somebody has submitted it once more
        why = why_restarted(run, attempt) or (NO_WORD if queued else why)
    place = read_progress(run.progress(attempt - 1))
    behind = place is not None and place.update >= updates
    return {
        "attempt": attempt,
        "restarts": topology.restarts,
        "why": why,
        "resumed_from": updates,
        "lost_updates": place.update - updates if behind and place else 0,
        "lost_micro_steps": place.done if behind and place else 0,
    }
