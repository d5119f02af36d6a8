"""One rank compared with a plain loop, on the CPU and on a GPU: the cost without communication."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.contenders import ALL, missing
from benchmarks.link import alone
from benchmarks.measure import keep, machine
from benchmarks.ranks import on_ranks

NETS = ("mlp", "transformer")
REFERENCE = "plain loop"


def devices() -> dict[str, str | None]:
    """Return the devices, each with why it cannot be used; None if it can."""
    absent = None if torch.cuda.is_available() else "needs CUDA, and torch sees no GPU"
    return {"cpu": None, "cuda": absent}


def measured(device: str, steps: list[int], *, quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Return times of both nets and peak memory of the larger, of each installed contender."""
    names = [name for name in ALL if missing(name) is None]
    common = {"leaves": steps, "device": device}
    where = {"ranks": 1, "link": device}
    times: list[dict[str, Any]] = []
    peaks: list[dict[str, Any]] = []
    for net in NETS:
        task = {
            "kind": "times", "net": net, "contenders": names, "reference": REFERENCE,
            "repetitions": (7, 7 if quick else 31), "budget_s": 10.0,
        }  # fmt: skip
        for row in on_ranks(alone(), common | task)["rows"]:
            row.update(where, net=net, steps=row.pop("leaves"))
            times.append(row)
    for name in names:
        task = {"kind": "peaks", "net": NETS[0], "contenders": [name]}
        for row in on_ranks(alone(), common | task)["rows"]:
            row.update(where, net=NETS[0], steps=row.pop("leaves"))
            peaks.append(row)
    return {"times": times, "peaks": peaks}


def main(*, quick: bool = False) -> None:
    data: dict[str, Any] = {
        "machine": machine(),
        "reference": REFERENCE,
        "contenders": [REFERENCE, *(name for name in ALL if name != REFERENCE)],
        "missing": {name: reason for name in ALL if (reason := missing(name))},
        "skipped": {device: reason for device, reason in devices().items() if reason},
        "times": [],
        "peaks": [],
    }
    if torch.cuda.is_available():
        data["machine"]["processor"] += f", {torch.cuda.get_device_name()}"
    for device, reason in devices().items():
        if reason:
            print(f"skipped: {device}, which {reason}")
            continue
        found = measured(device, [1, 8] if quick else [1, 2, 4, 8, 16], quick=quick)
        for kind, rows in found.items():
            data[kind] += rows
    keep("one_rank", data, quick=quick)
