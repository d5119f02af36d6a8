"""What all ranks did in a few windows, as values: compute, wait for each other, reduce, step.

Clocks of ranks are not compared. All leave a reduction at about the same time, so windows are laid
beside each other at its end; and what the rank that came last spent in it is the reduction itself,
of which every rank's remaining time in it was waiting for others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from orchestrator.errors import RunFolderError

MOST_RANKS = 48  # drawn of a window
PARTS = ("compute", "other", "waiting for others", "reduction", "optimizer")  # in their order
MEASURED = ("compute_s", "wait_s", "optimizer_s", "update_s")
DIGITS = 6


def timeline(
    windows: Sequence[Mapping[str, Any]], nodes: Mapping[int, str], failed: int | None
) -> list[dict[str, Any]]:
    """Each window with the ranks that are drawn, and for each of them when its parts begin.

    Args:
        nodes: of ranks, as far as known.
        failed: the rank that ended the run, if one did.

    Raises:
        RunFolderError: ranks do not have a number each, or one that is none.
    """
    for window in windows:
        columns = [window[name] for name in MEASURED]
        known = all(map(math.isfinite, chain(*columns)))
        if not known or len({len(column) for column in columns}) > 1 or not columns[0]:
            raise RunFolderError(f"what ranks tell of update {window['update']} is damaged")
    return [_window(window, nodes, failed) for window in windows]


def _window(
    window: Mapping[str, Any], nodes: Mapping[int, str], failed: int | None
) -> dict[str, Any]:
    reduction = min(window["wait_s"])
    rows = zip(*(window[name] for name in MEASURED), strict=True)
    found = [_rank(number, row, reduction) for number, row in enumerate(rows)]
    longest = max(one["before_s"] for one in found)
    drawn = _drawn(found)
    return {
        "kind": window["kind"],
        "update": window["update"] + 1,
        "of_ranks": len(found),
        "ranks": [
            {
                "rank": one["rank"],
                "name": _name(one["rank"], nodes, failed),
                "begins_s": round(longest - one["before_s"], DIGITS),
                "seconds": one["seconds"],
            }
            for one in drawn
        ],
    }


def _rank(rank: int, measured: Sequence[float], reduction: float) -> dict[str, Any]:
    compute, wait, optimizer, whole = measured
    other = max(0.0, whole - compute - wait - optimizer)
    seconds = (compute, other, wait - reduction, reduction, optimizer)
    told = {part: round(s, DIGITS) for part, s in zip(PARTS, seconds, strict=True)}
    return {"rank": rank, "seconds": told, "before_s": compute + other + wait}


def _drawn(ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All of them; of very many those that came last, and others evenly spaced."""
    if len(ranks) <= MOST_RANKS:
        return list(ranks)
    half = MOST_RANKS // 2
    latest = sorted(ranks, key=lambda one: one["seconds"]["waiting for others"])[:half]
    spread = [ranks[place * (len(ranks) - 1) // (half - 1)] for place in range(half)]
    chosen = {one["rank"]: one for one in (*latest, *spread)}
    return [chosen[rank] for rank in sorted(chosen)]


def _name(rank: int, nodes: Mapping[int, str], failed: int | None) -> str:
    where = f" on {nodes[rank]}" if rank in nodes else ""
    return f"{'✕ ' * (rank == failed)}rank {rank}{where}"
