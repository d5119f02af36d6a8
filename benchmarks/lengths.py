"""Samples of different lengths: the same updates, dealt in different ways; and a slow rank."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lengths_rank import (
    BY_NUMBER,
    BY_TOKENS,
    DDP,
    EQUAL,
    GROUPED,
    MEASURED,
    WARM_UP,
)
from benchmarks.link import Link, loopback
from benchmarks.markdown import grid
from benchmarks.measure import keep, machine
from benchmarks.ranks import on_ranks

ALL = [DDP, BY_NUMBER, EQUAL, BY_TOKENS, GROUPED]
CASES = [(2, 64, 0.5), (2, 64, 1.0), (2, 256, 0.5), (2, 256, 1.0), (4, 128, 0.5), (4, 128, 1.0)]
"""Ranks, global batch, and sigma of the logarithm of lengths."""

CGROUP = Path("/sys/fs/cgroup/cpu/benchmark-half")
PERIOD_US = 20_000
NOTE = """\
A transformer (192 wide, 3 layers) on drawn sequences of 8 to 256 bytes, lognormal around 64;
AdamW, loopback gloo, one thread a rank, in turn in the same processes; each micro-step in the
memory of 8 sequences of 256. A ratio is the time of the same updates to that of DDP + no_sync,
which takes samples as the loader gives them; in brackets that of the busiest rank in processor
time, which other work on the machine disturbs less. "Grouped" trains *other* updates."""


def summary(data: dict[str, Any]) -> str:
    """Return the table of all cases: times of the same updates, relative to DDP + no_sync."""
    lines: list[list[str]] = []
    for case in data["cases"]:
        rows = {row["name"]: row for row in case["rows"]}
        cells = [
            f"{rows[name]['ratio']['median']:.2f} ({rows[name]['cpu_ratio']:.2f})"
            for name in ALL[1:]
        ]
        title = f"{case['ranks']}, {case['global_batch']}, {case['sigma']:g}"
        lines.append([title, f"{rows[DDP]['update_ms']:.0f}", *cells])
    return grid(["ranks, G, sigma", f"{DDP} (ms)", *ALL[1:]], lines)


def body(data: dict[str, Any]) -> str:
    """Return the page: the table, and a part on a slow rank."""
    equal = f"All lengths equal (64): {data['equal']:.3f} of micro-batches of 32 samples."
    parts = [NOTE, summary(data), equal]
    if data.get("half"):
        head = ["", "update (ms)", "to DDP", "to the ideal of the summed speeds"]
        lines = [
            [
                row["name"],
                f"{row['update_ms']:.0f}",
                f"{row['ratio']['median']:.2f}",
                f"{row['to_ideal']:.2f}",
            ]
            for row in data["half"]
        ]
        parts += [
            "Two ranks, one with half of a processor (a cgroup's quota), G = 128, sigma = 0.5:",
            grid(head, lines),
        ]
    return "\n\n".join(parts)


@contextmanager
def half_a_processor(link: Link) -> Generator[Link]:
    """Give the last rank of `link` half of a processor."""
    CGROUP.mkdir(exist_ok=True)
    try:
        (CGROUP / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (CGROUP / "cpu.cfs_quota_us").write_text(str(PERIOD_US // 2))
        enter = ("sh", "-c", f'echo $$ > {CGROUP}/tasks && exec "$@"', "sh")
        yield replace(link, prefixes=(*link.prefixes[:-1], (*enter, *link.prefixes[-1])))
    finally:
        CGROUP.rmdir()


def _rows(link: Link, names: list[str], **task: Any) -> list[dict[str, Any]]:
    whole = {"kind": "lengths", "net": "mlp", "contenders": names, "warm_up": WARM_UP, **task}
    return on_ranks(link, whole)["rows"]


def main(*, quick: bool = False) -> None:
    data: dict[str, Any] = {"machine": machine(), "cases": []}
    for ranks, size, sigma in CASES[: 2 if quick else None]:
        with loopback(ranks) as link:
            task = {"global_batch": size, "sigma": sigma, "updates": 4 if quick else 6}
            rows = _rows(link, ALL, **task)
            data["cases"].append({"ranks": ranks, **task, "rows": rows})
    updates = 6 if quick else 12
    with loopback(2) as link:
        task = {"global_batch": 256, "sigma": 0.0, "updates": updates}
        data["equal"] = _rows(link, [BY_NUMBER, BY_TOKENS], **task)[1]["ratio"]["median"]
    if os.access(CGROUP.parent / "cpu.cfs_quota_us", os.W_OK):
        names = [DDP, BY_TOKENS, MEASURED]
        task = {"global_batch": 128, "sigma": 0.5, "updates": updates}
        with loopback(2) as link:
            whole = {row["name"]: row for row in _rows(link, names, **task)}
        with loopback(2) as link, half_a_processor(link) as unequal:
            rows = _rows(unequal, names, **{**task, "warm_up": 12})
        ideal_ms = whole[BY_TOKENS]["update_ms"] * 2 / 1.5
        data["half"] = [row | {"to_ideal": row["update_ms"] / ideal_ms} for row in rows]
    keep("lengths", data, quick=quick)
