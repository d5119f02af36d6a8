"""Is config.yaml the one that the run last went on with? An older one of its own is whole, too.

A backup brought back in part, or a file of an earlier attempt put in its place, has a sound seal
and the run's identity. What tells it is the record of the resumes since, and the newest checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from orchestrator.config.changes import flat
from orchestrator.errors import RunFolderError
from orchestrator.rundir.folder import RunDir


def refuse_left_behind(run: RunDir, values: Mapping[str, Any]) -> None:
    """Raises `RunFolderError` when a configuration lacks what a later resume changed.

    Args:
        values: of config.yaml, by section.
    """
    now = json.loads(json.dumps(dict(flat(values))))
    begun = {
        entry["attempt"]: entry  # the last word of those that asked for the same attempt
        for entry in run.read_resumes()
        if entry["attempt"] < run.attempts_made()  # so config.yaml was written before
    }
    asked = {
        key: (after, attempt)
        for attempt, entry in sorted(begun.items())
        for key, (_, after) in entry.get("changes", {}).items()
    }
    for key, (after, attempt) in asked.items():
        if now.get(key) != after:
            raise RunFolderError(
                f"{run.config} is an older one of this run: it has {key}={_shown(now.get(key))}, "
                f"but attempt {attempt} began with {_shown(after)}; bring back the newest"
            )


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)
