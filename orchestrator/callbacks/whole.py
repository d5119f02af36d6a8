"""Which of a framework's checkpoints are whole: those that a mark beside them says were finished.

A framework writes its files one after the other, and may be killed among them.
"""

from __future__ import annotations

from pathlib import Path

from orchestrator.inside.run import current_run

MARK = ".whole"


def mark(checkpoint: Path) -> None:
    """A checkpoint was written to its end. For rank 0, once all ranks have written their parts.

    What was reported before is on the disk then: the next start goes on after it.
    """
    current_run.flush()
    checkpoint.with_name(checkpoint.name + MARK).touch(mode=0o600)


def newest(folder: Path, prefix: str) -> tuple[int, Path] | None:
    """The whole checkpoint `<prefix><number>` of the highest number, and that number."""
    found = [
        (int(number), path.with_name(path.name.removesuffix(MARK)))
        for path in folder.glob(f"{prefix}*{MARK}")
        if (number := path.name.removeprefix(prefix).removesuffix(MARK)).isdecimal()
    ]
    return max(((n, path) for n, path in found if path.exists()), default=None)
