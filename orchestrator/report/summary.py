"""The figures of one run, computed once for every table that shows them.

Figures per update come from `metrics.jsonl`, because that is where they were measured; totals of
`result.json` stand in where a run left no metrics. None means not known and is never taken as zero.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from orchestrator.report.metrics import Record

TRAFFIC = ("collectives", "bytes_on_wire")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run cost. Seconds, bytes, and counts per update unless the name says otherwise."""

    state: str
    updates: int
    samples: int | None
    seconds: float | None
    seconds_per_update: float | None
    samples_per_second: float | None
    time_shares: dict[str, float]
    collectives_per_update: float | None
    bytes_on_wire_per_update: float | None
    peak_memory_bytes: int | None
    memory_bytes: dict[str, int]
    metrics: dict[str, Any]


def summarize(result: Mapping[str, Any] | None, updates: Sequence[Record]) -> Summary:
    """The figures of a run from its result (None when it wrote none) and its update records."""
    result = result or {}
    count = _first(result.get("updates"), len(updates))
    return Summary(
        state=str(result.get("state", "no result")),
        updates=count,
        samples=_first(result.get("samples"), total(updates, "samples")),
        seconds=result.get("seconds") or None,  # no update was made, or none was told of
        **_pace(result, updates),
        **{f"{name}_per_update": _per_update(result, updates, name) for name in TRAFFIC},
        **_memory(result, updates),
        metrics=dict(result.get("metrics") or {}),
    )


def _pace(result: Mapping[str, Any], updates: Sequence[Record]) -> dict[str, Any]:
    return {
        "seconds_per_update": seconds_per_update(updates),
        "samples_per_second": _samples_per_second(result, updates),
        "time_shares": time_shares(updates),
    }


def _memory(result: Mapping[str, Any], updates: Sequence[Record]) -> dict[str, Any]:
    told = (result.get("memory") or {}).items()
    parts = {name: size for name, size in told if size is not None and name != "peak"}
    return {"peak_memory_bytes": _peak(result, updates), "memory_bytes": parts}


def seconds_per_update(updates: Sequence[Record]) -> float | None:
    """The median, without the first update of each attempt: that one also warms caches up.

    >>> seconds_per_update([{"update": n, "update_s": s} for n, s in enumerate([9.0, 1.0, 1.2])])
    1.1
    """
    timed = [r["update_s"] for r in _warm(updates)]
    return statistics.median(timed) if timed else None


def _warm(updates: Sequence[Record]) -> list[Record]:
    """Timed updates without the first of each attempt, unless there are no others."""
    timed = [r for r in updates if r.get("update_s")]
    warm = [r for before, r in pairwise(updates) if r.get("attempt", 0) == before.get("attempt", 0)]
    return [r for r in warm if r.get("update_s")] or timed


def time_shares(updates: Sequence[Record]) -> dict[str, float]:
    """Shares of the updates' wall time, by what it went into; `other` is loading and bookkeeping.

    >>> time_shares([{"compute_s": 6.0, "wait_s": 2.0, "optimizer_s": 1.0, "update_s": 10.0}])
    {'compute': 0.6, 'wait': 0.2, 'optimizer': 0.1, 'other': 0.1}
    """
    parts = {name: total(updates, f"{name}_s") for name in ("compute", "wait", "optimizer")}
    known = {name: seconds for name, seconds in parts.items() if seconds is not None}
    whole = max(total(updates, "update_s") or 0.0, sum(known.values()))
    if not known or whole <= 0:
        return {}
    shares = {name: seconds / whole for name, seconds in known.items()}
    return {**shares, "other": round(1 - sum(shares.values()), 12)}


def _samples_per_second(result: Mapping[str, Any], updates: Sequence[Record]) -> float | None:
    """From the updates: `seconds` may be those of the last attempt, `samples` of all of them."""
    timed = [r for r in _warm(updates) if r.get("samples") is not None]
    if timed:
        return sum(r["samples"] for r in timed) / sum(r["update_s"] for r in timed)
    if result.get("samples") and result.get("seconds"):
        return result["samples"] / result["seconds"]
    return None


def _per_update(result: Mapping[str, Any], updates: Sequence[Record], name: str) -> float | None:
    values = [r[name] for r in updates if r.get(name) is not None]
    if values:
        return sum(values) / len(values)
    if result.get(name) is not None and result.get("updates"):
        return result[name] / result["updates"]
    return None


def _peak(result: Mapping[str, Any], updates: Sequence[Record]) -> int | None:
    ranks = [size for size in result.get("peak_memory_bytes") or [] if size is not None]
    seen = [r["peak_memory_bytes"] for r in updates if r.get("peak_memory_bytes") is not None]
    return max(ranks or seen, default=None)


def total(updates: Sequence[Record], name: str) -> Any:
    """The sum of what updates say under a name; None where none says it."""
    values = [r[name] for r in updates if r.get(name) is not None]
    return sum(values) if values else None


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
