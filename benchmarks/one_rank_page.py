"""The page of `one_rank`."""

from __future__ import annotations

from benchmarks import peers_page
from benchmarks import peers_tables as tables
from benchmarks.peers_tables import Row, by_contender, distinct, grid, mib, select

METHOD = """\
As in [the comparison of ranks](peers.md), with one rank, which nobody sends anything to. The plain
loop is what one writes without any tool, so the rest is overhead. On the CPU memory is what the
process had beyond that before the model was built, on a GPU what torch allocated."""


def _peak(rows: list[Row]) -> str:
    return mib(rows[0]["bytes"]) if rows else "not measured"


def body(data: Row) -> str:
    """Return the page: times, and peak memory of the larger net."""
    parts = [METHOD, peers_page.verdict(data)]
    parts += [f"Skipped: {name}, which {reason}." for name, reason in data["skipped"].items()]
    parts += ["## Time of an update", tables.times(data), "## Peak memory (MiB)"]
    for device in distinct(data["peaks"], "link"):
        rows = select(data["peaks"], link=device)
        steps = distinct(rows, "steps")
        head = [f"{rows[0]['net']}, {device}", *(f"K = {k}" for k in steps)]
        parts.append(grid(head, by_contender(data, rows, _peak, steps)))
    return "\n\n".join(parts)
