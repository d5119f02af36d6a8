"""The price of equal bits: an update of ten leaves of `digits` on 1 to 4 ranks."""

from __future__ import annotations

from typing import Any

from benchmarks.link import loopback
from benchmarks.markdown import grid, spread_cells
from benchmarks.measure import keep, machine
from benchmarks.ranks import on_ranks

FAST, SAME_BITS = "ours", "ours, reproducible"
LEAVES = 10
NOTE = f"""\
An update of {LEAVES} leaves of 16 samples of `digits` (784-512-256-128-10), loopback gloo, both
ways in turn in the same processes. Where ranks outnumber cores, they compute in each other's
time."""


def body(data: dict[str, Any]) -> str:
    """Return the page: a line for each number of ranks."""
    head = ["ranks", "fast (ms)", "reproducible (ms)", "ratio", "quartiles", "collectives"]
    lines: list[list[str]] = []
    for ranks, rows in data["ranks"].items():
        row = {one["name"]: one for one in rows}
        fast, slow = row[FAST], row[SAME_BITS]
        lines.append(
            [
                ranks,
                f"{1000 * fast['spread']['median']:.1f}",
                f"{1000 * slow['spread']['median']:.1f}",
                *spread_cells(slow["ratio"], ".2f"),
                f"{fast['collectives']} and {slow['collectives']}",
            ]
        )
    return f"{NOTE}\n\n{grid(head, lines, left=0)}"


def main(*, quick: bool = False) -> None:
    data: dict[str, Any] = {"machine": machine(), "ranks": {}}
    repetitions = (7, 7) if quick else (31, 31)
    for ranks in (1, 2, 3, 4):
        task = {
            "kind": "times",
            "net": "digits",
            "contenders": [FAST, SAME_BITS],
            "reference": FAST,
            "leaves": [LEAVES],
            "repetitions": repetitions,
            "budget_s": 0.0,
        }
        with loopback(ranks) as link:
            data["ranks"][str(ranks)] = on_ranks(link, task)["rows"]
    keep("reproducible", data, quick=quick)
