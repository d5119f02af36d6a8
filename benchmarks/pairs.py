"""An update of ours and of DDP + no_sync, in many pairs, and what the machine can tell apart."""

from __future__ import annotations

from typing import Any

from benchmarks.link import loopback
from benchmarks.markdown import grid
from benchmarks.measure import keep, machine
from benchmarks.ranks import on_ranks

OURS, DDP = "ours", "DDP + no_sync"
SAME, CHECKED = "DDP + no_sync, again", "DDP + no_sync, norm and loss"
RANKS, STEPS = 2, (1, 2, 4, 8, 16)
NOTE = f"""\
Two ranks, loopback gloo, in turn in the same processes. A ratio is the median over rounds of the
seconds to those of DDP + no_sync in the same round (quartiles in brackets). "{SAME}" is a
second copy of it: as far as that is from 1, this machine cannot tell. "{CHECKED}" does
by hand what an update of ours does as well: the loss of all ranks, the gradient's norm, and both
are finite."""


def body(data: dict[str, Any]) -> str:
    """Return the page: a line for each net and K."""
    head = ["net", "K", "rounds", f"{DDP} (ms)", "ours", SAME, CHECKED]
    lines: list[list[str]] = []
    for net, rows in data["nets"].items():
        for steps in sorted({row["leaves"] // RANKS for row in rows}):
            row = {one["name"]: one for one in rows if one["leaves"] == steps * RANKS}
            ratios = [
                f"{one['median']:.3f} ({one['q1']:.2f} to {one['q3']:.2f})"
                for one in (row[name]["ratio"] for name in (OURS, SAME, CHECKED))
            ]
            ddp = row[DDP]["spread"]
            milliseconds = f"{1000 * ddp['median']:.0f}"
            lines.append([net, str(steps), str(ddp["count"]), milliseconds, *ratios])
    return f"{NOTE}\n\n{grid(head, lines)}"


def main(*, quick: bool = False) -> None:
    data: dict[str, Any] = {"machine": machine(), "nets": {}}
    rounds = 7 if quick else 101
    for net in ("mlp", "transformer"):
        task = {
            "kind": "times",
            "net": net,
            "contenders": [DDP, SAME, CHECKED, OURS],
            "reference": DDP,
            "leaves": [RANKS * steps for steps in STEPS],
            "repetitions": (rounds, rounds),
            "budget_s": 0.0,
        }
        with loopback(RANKS) as link:
            data["nets"][net] = on_ranks(link, task)["rows"]
    keep("pairs", data, quick=quick)
