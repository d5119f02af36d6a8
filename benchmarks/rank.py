"""One rank of a side-by-side measurement, started by `benchmarks.ranks.on_ranks`.

`python -m benchmarks.rank TASK FILE`, where TASK is JSON: `kind` (times, losses, peaks, boundary),
`net`, `contenders`, `leaves` (micro-steps of all ranks together, a list), and what the kind needs
besides.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders import BY_NAME, Contender, Setting
from benchmarks.contenders.ours import Ours
from benchmarks.link import sent_bytes
from benchmarks.measure import Spread, interleaved, rows_of, turns
from benchmarks.workload import NETS, Batch, built
from orchestrator.engine.torch import TorchGroup


class Bench:
    """The task, the group, and one timed update of any contender."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.task, self.net = task, NETS[task["net"]]
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.group = TorchGroup.wrap(dist.group.WORLD)
        self.setting = Setting(group=self.group, rate=self.net.rate)
        self.counted = task["senders"] is not None and self.group.size > 1

    def contender(self, name: str) -> Contender:
        """Return a new contender, with the common initial weights; "NAME, again" as NAME."""
        return BY_NAME[name.removesuffix(", again")](built(self.net), self.setting)

    def share(self, leaves: int) -> range:
        """Return the micro-batches of this rank among `leaves`."""
        rank, ranks = self.group.rank, self.group.size
        return range(leaves * rank // ranks, leaves * (rank + 1) // ranks)

    def batches(self, update: int, leaves: int) -> list[Batch]:
        """Return this rank's micro-batches of an update."""
        return [self.net.batch(update * leaves + number) for number in self.share(leaves)]

    def timed(
        self, contender: Contender, batches: Sequence[Batch], leaves: int
    ) -> tuple[float, Tensor]:
        """Return the seconds of an update from barrier to barrier, and this rank's loss."""
        dist.barrier()
        began = time.perf_counter()
        loss = contender.update(batches, first=self.share(leaves).start, leaves=leaves)
        dist.barrier()
        return time.perf_counter() - began, loss

    def seconds(self, contender: Contender, batches: Sequence[Batch], leaves: int) -> float:
        """Return the seconds of an update."""
        return self.timed(contender, batches, leaves)[0]

    def traffic(self, contender: Contender, batches: Sequence[Batch], leaves: int) -> list[Any]:
        """Return collectives of an update by the group's own count, and bytes sent by one rank."""
        dist.barrier()
        calls = self.group.transport_collectives() or 0
        before = sent_bytes(self.task["interface"]) if self.counted else 0
        contender.update(batches, first=self.share(leaves).start, leaves=leaves)
        called = (self.group.transport_collectives() or 0) - calls
        dist.barrier()  # a few hundred bytes, to know that all is sent
        if not self.counted:
            return [called, None]
        return [called, (sent_bytes(self.task["interface"]) - before) / self.task["senders"]]

    def agreed(self, number: int) -> int:
        """Return rank 0's number on all ranks."""
        told = torch.tensor([number])
        dist.broadcast(told, 0)
        return int(told)


def times(bench: Bench) -> list[dict[str, Any]]:
    """Measure an update of each contender in turn, for each number of micro-steps.

    As many repetitions as fit into `budget_s`, within `repetitions` = [least, most].
    """
    least, most = bench.task["repetitions"]
    contenders = {name: bench.contender(name) for name in bench.task["contenders"]}
    rows: list[dict[str, Any]] = []
    for leaves in bench.task["leaves"]:
        batches = bench.batches(0, leaves)
        began = time.perf_counter()
        for one in [*contenders.values()] * 2:  # DDP arranges its buckets anew in the second
            bench.timed(one, batches, leaves)
        traffic = {name: bench.traffic(one, batches, leaves) for name, one in contenders.items()}
        fits = bench.task["budget_s"] / ((time.perf_counter() - began) / 3)
        calls_of = {
            name: partial(bench.seconds, one, batches, leaves) for name, one in contenders.items()
        }
        count = bench.agreed(int(min(max(fits, least), most)))
        figures = interleaved(calls_of, count, warm_up=0)
        for row in rows_of(figures, bench.task["reference"]):
            calls, sent = traffic[row["name"]]
            rows.append(row | {"leaves": leaves, "collectives": calls, "bytes": sent})
    return rows


def losses(bench: Bench) -> list[dict[str, Any]]:
    """Train `updates` updates of each contender on the same data, in turn."""
    (leaves,) = bench.task["leaves"]
    names = bench.task["contenders"]
    contenders = {name: bench.contender(name) for name in names}
    for one in contenders.values():  # lays out memory and buckets; the weights are then put back
        one.update(bench.batches(0, leaves), first=bench.share(leaves).start, leaves=leaves)
    contenders = {name: bench.contender(name) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for update, turn in enumerate(turns(names, bench.task["updates"])):
        batches = bench.batches(update, leaves)
        for name in turn:
            took, loss = bench.timed(contenders[name], batches, leaves)
            seconds[name].append(took)
            found[name].append(loss)
    rows: list[dict[str, Any]] = []
    for name in names:
        mean = torch.stack(found[name])
        dist.all_reduce(mean)  # equal shares, so the mean of means is the mean
        curve = (mean / bench.group.size).tolist()
        rows.append({"name": name, "losses": curve, "seconds": seconds[name]})
    return rows


def peaks(bench: Bench) -> list[dict[str, Any]]:
    """Return rank 0's peak memory with one contender, beyond that before the model was built.

    Memory of imported libraries does not count.
    """
    (name,) = bench.task["contenders"]
    data = {leaves: bench.batches(0, leaves) for leaves in bench.task["leaves"]}
    torch.ones(64, 64) @ torch.ones(64, 64)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak so far
    before = _peak_bytes()
    contender = bench.contender(name)
    rows: list[dict[str, Any]] = []
    for leaves, batches in data.items():
        for _ in range(3):
            bench.timed(contender, batches, leaves)
        rows.append({"name": name, "leaves": leaves, "bytes": _peak_bytes() - before})
    return rows


def boundary(bench: Bench) -> list[dict[str, Any]]:
    """Return one rank's seconds of updates, and of boundaries less the optimizer's step."""
    one = Ours(built(bench.net), bench.setting)
    stamps: list[float] = []
    optimizer = one.accumulator.optimizer
    optimizer.register_step_pre_hook(lambda *_: stamps.append(time.perf_counter()))
    optimizer.register_step_post_hook(lambda *_: stamps.append(time.perf_counter()))
    rows: list[dict[str, Any]] = []
    for leaves in bench.task["leaves"]:
        batches = bench.batches(0, leaves)
        updates: list[float] = []
        beyond: list[float] = []
        for repetition in range(bench.task["repetitions"] + 2):
            stamps.clear()
            began = time.perf_counter()
            one.begin(steps=leaves, first=0, leaves=leaves)
            for step, batch in enumerate(batches):
                one.micro_step(batch, step, last=step == leaves - 1)
            reached = time.perf_counter()
            one.end()
            ended = time.perf_counter()
            if repetition >= 2:
                updates.append(ended - began)
                beyond.append(ended - reached - (stamps[1] - stamps[0]))
        shares = [part / whole for part, whole in zip(beyond, updates, strict=True)]
        spreads = {"update": updates, "beyond": beyond, "share": shares}
        rows.append({"leaves": leaves, **{k: Spread.of(v).rounded() for k, v in spreads.items()}})
    return rows


def lengths(bench: Bench) -> list[dict[str, Any]]:
    """Measure updates of samples that differ in length, dealt in different ways."""
    from benchmarks.lengths_rank import measure

    return measure(bench.task, bench.group)


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def main() -> None:
    bench = Bench(json.loads(sys.argv[1]))
    kinds = {
        "times": times,
        "losses": losses,
        "peaks": peaks,
        "boundary": boundary,
        "lengths": lengths,
    }
    rows = kinds[bench.task["kind"]](bench)
    if bench.group.rank == 0:
        parameters = sum(parameter.numel() for parameter in built(bench.net).parameters())
        text = json.dumps({"parameters": parameters, "rows": rows})
        Path(sys.argv[2]).write_text(text, encoding="utf-8")
    dist.barrier()
    sys.stderr.flush()
    os._exit(0)  # nothing is left to say, and gloo's ends would wait for each other


if __name__ == "__main__":
    main()
