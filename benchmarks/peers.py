"""Ours beside DDP and FSDP2 on two ranks: an update's seconds, collectives and bytes as K grows."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

from benchmarks.link import Link, can_make_nodes, loopback, on_ranks, two_nodes
from benchmarks.measure import publish

RANKS = 2
STEPS = (1, 2, 4, 8)
CONTENDERS = ("ours", "DDP + no_sync", "DDP plain", "FSDP2", "ours, reproducible")
REFERENCE = "DDP + no_sync"
MODELS = {"mlp": "MLP of 8 x Linear(1024)", "transformer": "transformer, width 128, 4 layers"}


def _links() -> dict[str, Any]:
    if can_make_nodes():
        return {"not shaped": two_nodes(None), "1 Gbit/s": two_nodes("1gbit")}
    print("not root: on the loopback, unshaped, and without counting bytes")
    return {"loopback": nullcontext(loopback(RANKS))}


def _measure(link: Link, model: str) -> dict[str, Any]:
    leaves = ",".join(str(RANKS * steps) for steps in STEPS)
    return on_ranks(
        link, ["--model", model, "--contenders", ";".join(CONTENDERS), "--leaves", leaves]
    )


def _table(found: dict[str, Any]) -> list[str]:
    floor = 2 * (RANKS - 1) / RANKS * 4 * found["parameters"]
    lines = [
        "| K | contender | ms (median) | lowest to highest | ratio | collectives | bytes |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    base = {row["leaves"]: row["median"] for row in found["rows"] if row["name"] == REFERENCE}
    for row in found["rows"]:
        sent = "not counted" if row["bytes"] is None else f"{row['bytes'] / floor:.3f}"
        lines.append(
            f"| {row['leaves'] // RANKS} | {row['name']} | {1000 * row['median']:.1f} "
            f"| {1000 * row['low']:.1f} to {1000 * row['high']:.1f} "
            f"| {row['median'] / base[row['leaves']]:.2f} | {row['collectives']} | {sent} |"
        )
    return lines


def main() -> None:
    text: list[str] = []
    data: dict[str, Any] = {}
    for name, made in _links().items():
        with made as link:
            for model, words in MODELS.items():
                found = _measure(link, model)
                data[f"{model}, {name}"] = found
                text += [f"## {words} ({found['parameters']:,} parameters), link {name}", ""]
                text += [*_table(found), ""]
    note = (
        "Two ranks of one thread each. Milliseconds of an update: rank 0's, between barriers; "
        "contenders run in turn in the same processes. Ratio: to DDP + no_sync. Bytes: what left "
        "rank 0's interface, headers included, to the floor of 2(R-1)/R of the gradient's bytes. "
        f"Load average at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; where it is "
        "above the number of ranks, seconds are of little worth, bytes and collectives are exact."
    )
    publish("peers", "An update beside DDP and FSDP2", "\n".join([note, "", *text]), data)


if __name__ == "__main__":
    main()
