"""Helpers of the callbacks for frameworks: complete checkpoints, and figures from their logs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.client.arguments import MOST_FIGURES
from orchestrator.client.run import current_run

# A framework writes the files of a checkpoint one after the other, and may be killed before the
# last; a mark next to it says that it was finished.
MARK = ".whole"
NOT_FIGURES = ("loss", "samples", "update", "self")  # other arguments of `report`


def mark(checkpoint: Path, update: int, *, first_rank: bool) -> None:
    """Mark a checkpoint after `update` as complete, on the first rank, once all ranks have written
    their parts: the next start continues after it.
    """
    if first_rank:
        checkpoint.with_name(checkpoint.name + MARK).touch(mode=0o600)
    current_run.save_done(update)


def newest(prefix: str) -> tuple[int, Path] | None:
    """Return the complete checkpoint `<prefix><number>` of the highest number, and that number;
    None without a run.
    """
    if not current_run:
        return None
    checkpoints = [
        (int(number), path.with_name(path.name.removesuffix(MARK)))
        for path in current_run.checkpoint_dir.glob(f"{prefix}*{MARK}")
        if (number := path.name.removeprefix(prefix).removesuffix(MARK)).isdecimal()
    ]
    return max(((n, path) for n, path in checkpoints if path.exists()), default=None)


def figures_of(logged: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the numbers among what a framework logs, as many as `report` takes."""
    figures = {
        name: value
        for name, value in (logged or {}).items()
        if name not in NOT_FIGURES and _is_number(value)
    }
    return dict(list(figures.items())[:MOST_FIGURES])


def _is_number(value: Any) -> bool:
    if isinstance(value, int | float):
        return True
    return hasattr(value, "numel") and value.numel() == 1
