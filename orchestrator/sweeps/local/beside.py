"""Which points of a sweep computed side by side on one machine, and disturbed each other.

Nobody has to note it: when a point computed stands in its metrics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.report.tables.sweep_table import SweptRun, names
from orchestrator.run_folder.rundir import RunDir


def timed_beside(cells: Sequence[SweptRun]) -> str | None:
    """A sentence about points that were timed while others computed; None where there are none."""
    spans = sorted(
        (*span, name)
        for name, cell in zip(names(cells), cells, strict=True)
        if RunDir(cell.folder).read_submission().get("held")
        for span in _spans(cell)
    )
    found: set[str] = set()
    last_end, last = 0.0, ""
    for begin, end, name in spans:
        if begin < last_end and name != last:
            found |= {name, last}
        if end > last_end:
            last_end, last = end, name
    if not found:
        return None
    which = ", ".join(name for name in names(cells) if name in found)
    words = "All points" if len(found) == len(cells) else f"Points {which}"
    return (
        f"{words} were timed side by side with others on one machine, which makes their updates "
        f"slower and less alike, and no comparison; sweep.parallel=1 times one after another."
    )


def _spans(cell: SweptRun) -> Iterator[tuple[float, float]]:
    """From when to when it made updates, in seconds since 1970; for each attempt."""
    attempts: dict[int, list[tuple[float, float]]] = {}
    for update in cell.updates:
        if update.get("time") and update.get("update_s"):
            span = (update["time"] - update["update_s"], update["time"])
            attempts.setdefault(update.get("attempt", 0), []).append(span)
    for made in attempts.values():
        yield min(begin for begin, _ in made), max(end for _, end in made)
