"""Where a new run goes."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from orchestrator.config.program import short_name
from orchestrator.config.schema import Config


def new_folder(config: Config) -> Path:
    """Where a new run goes: `run.dir`, or a folder of its own below `runs/`."""
    if config.run.dir:
        return Path(os.path.abspath(Path(config.run.dir).expanduser()))  # noqa: PTH100  # keeps links
    name = config.run.name or short_name(config.job)
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
    stamp = datetime.now().astimezone().strftime("%Y-%m-%d_%H-%M-%S")
    base = Path.cwd() / "runs" / f"{stamp}_{safe}"
    candidate, number = base, 1
    while candidate.exists():
        number += 1
        candidate = base.with_name(f"{base.name}_{number}")
    return candidate
