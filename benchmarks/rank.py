"""One rank of a side-by-side measurement; `benchmarks.link.on_ranks` starts it."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders import Batch, contenders, model_and_batch
from benchmarks.link import sent_bytes
from benchmarks.measure import interleaved
from orchestrator.engine.torch import TorchGroup


class Timed:
    """A contender at one number of micro-steps: seconds an update, and what the transport did."""

    def __init__(self, update: Any, batch: Batch, leaves: int, group: TorchGroup) -> None:
        self._update, self._group, self._leaves = update, group, leaves
        rank, ranks = group.rank, group.size
        self._first = leaves * rank // ranks
        self._batches = [batch] * (leaves * (rank + 1) // ranks - self._first)
        self.collectives = 0
        self.bytes: int | None = None

    def once(self, *, takes_leaves: bool) -> float:
        """Run one update between barriers."""
        more = {"leaves": self._leaves} if takes_leaves else {}
        interface = os.environ["GLOO_SOCKET_IFNAME"]
        self._group.barrier()
        calls, before = self._group.transport_collectives() or 0, sent_bytes(interface)
        began = time.perf_counter()
        self._update(self._batches, self._first, **more)
        self.collectives = (self._group.transport_collectives() or 0) - calls
        self._group.barrier()
        seconds = time.perf_counter() - began
        after = sent_bytes(interface)
        self.bytes = None if after is None or before is None else after - before
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--contenders", required=True)
    parser.add_argument("--leaves", required=True, help="micro-steps of all ranks together")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = TorchGroup.wrap(dist.group.WORLD)
    model, batch = model_and_batch(given.model)
    updates = contenders(given.contenders.split(";"), model, group)
    rows = []
    for leaves in map(int, given.leaves.split(",")):
        timed = {name: Timed(update, batch, leaves, group) for name, update in updates.items()}
        calls = {
            name: lambda t=t, name=name: t.once(takes_leaves=name.endswith("reproducible"))
            for name, t in timed.items()
        }
        for figure in interleaved(calls, given.repetitions):
            one = timed[figure.name]
            rows.append(
                asdict(figure)
                | {"leaves": leaves, "collectives": one.collectives, "bytes": one.bytes}
            )
    if group.rank == 0:
        parameters = sum(p.numel() for p in model.parameters())
        given.out.write_text(json.dumps({"parameters": parameters, "rows": rows}))
    dist.barrier()
    os._exit(0)  # nothing is left to say, and gloo's ends would wait for each other


if __name__ == "__main__":
    main()
