"""One rank on a GPU beside a plain loop: what the accumulator costs where nothing is sent."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.contenders import ALL, missing
from benchmarks.link import Link
from benchmarks.measure import keep, machine
from benchmarks.ranks import on_ranks

NETS = ("mlp", "transformer")
REFERENCE = "plain loop"
_HERE = Link(name="none", prefixes=((),), address="127.0.0.1", interface="lo", senders=None)


def measured(device: str, *, quick: bool) -> dict[str, Any]:
    """Times and peak memory of everybody who is installed, on one rank."""
    steps = (1, 8) if quick else (1, 2, 4, 8, 16)
    names = [name for name in ALL if missing(name) is None]
    data: dict[str, Any] = {
        "machine": machine(),
        "reference": REFERENCE,
        "contenders": [REFERENCE, *(name for name in ALL if name != REFERENCE)],
        "missing": {name: reason for name in ALL if (reason := missing(name))},
        "times": [],
        "peaks": [],
    }
    for net in NETS:
        common = {"net": net, "leaves": list(steps), "device": device}
        times = {"kind": "times", "contenders": names, "reference": REFERENCE,
                 "repetitions": (7, 31), "budget_s": 10.0}  # fmt: skip
        where = {"net": net, "ranks": 1, "link": "one rank"}
        for row in on_ranks(_HERE, common | times)["rows"]:
            data["times"].append({**where, "steps": row.pop("leaves"), **row})
        for name in names:
            for row in on_ranks(_HERE, common | {"kind": "peaks", "contenders": [name]})["rows"]:
                data["peaks"].append({**where, "steps": row.pop("leaves"), **row})
    return data


def main(*, quick: bool = False) -> None:
    if not torch.cuda.is_available():
        print("skipped: needs a CUDA GPU, and torch sees none")
        return
    data = measured("cuda", quick=quick)
    data["machine"]["processor"] = torch.cuda.get_device_name()
    keep("gpu", data, quick=quick)
