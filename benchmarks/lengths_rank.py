"""One rank of `benchmarks.lengths`: the same update, its samples dealt in different ways."""

from __future__ import annotations

import math
import time
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measure import rows_of, turns
from jobs.language_model import LanguageModel, Transformer
from orchestrator.client.balance import SPARE_WINDOWS, MeasuredSpeeds
from orchestrator.client.loop import RankWindows
from orchestrator.config.schema import Config
from orchestrator.engine.api import EngineSettings
from orchestrator.engine.torch import TorchGroup
from orchestrator.engine.torch.engine import TorchEngine
from orchestrator.plan.cost import deal
from orchestrator.plan.parts import JobFacts
from orchestrator.plan.plan import Plan

LONGEST, WIDTH, LAYERS, HEADS = 256, 192, 3, 6
SAMPLES_EACH = 8
"""Samples of a micro-batch that is cut by number; as many of the longest fit into memory."""

RATE = 1e-3


class DrawnText:
    """`count` sequences of 8 to 256 bytes, their lengths lognormal.

    Attributes:
        lengths: of all, in bytes.
    """

    def __init__(self, count: int, sigma: float) -> None:
        draw = torch.Generator().manual_seed(1)
        lengths = (torch.randn(count, generator=draw) * sigma + math.log(64)).exp()
        self.lengths = [int(length) for length in lengths.clamp(8, LONGEST)]
        self._bytes = torch.randint(1, 256, (count, LONGEST), generator=draw, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        return self._bytes[index, : self.lengths[index]]


class DrawnTextModel(LanguageModel):
    """The language model of the examples on drawn text, with the cost of its attention."""

    def __init__(self, data: DrawnText) -> None:
        super().__init__(WIDTH, LAYERS, HEADS, LONGEST, dropout=0.0)
        self._data = data

    def dataset(self) -> Any:
        return self._data

    def cost(self, length: int, samples: int) -> float:
        """Return the multiplications of a forward; a micro-step's own costs count as tokens do."""
        a_token = 12 * WIDTH**2 * LAYERS + WIDTH * 256
        return samples * length * a_token + 2 * samples * length**2 * WIDTH * LAYERS


class Ours:
    """A job class with `accumulation.micro_tokens`, or without: cut by number."""

    def __init__(self, job: DrawnTextModel, group: Any, global_batch: int, **batch: Any) -> None:
        settings = EngineSettings(optimizer={"name": "adamw"}, metric_names=job.metric_names)
        self._engine = TorchEngine(job, settings, group)
        config = Config()
        config.cluster.nodes, config.cluster.ranks_per_node = 1, group.size
        config.train.updates, config.schedule.base_lr = 10**6, RATE
        config.accumulation.global_batch = global_batch
        for name, value in batch.items():
            setattr(config.accumulation, name, value)
        lengths = np.array(job.dataset().lengths)
        facts = JobFacts(dataset_samples=len(lengths), lengths=lengths, cost=job.cost)
        self.plan = Plan.of(config, facts)
        speeds = None
        if config.accumulation.balance == "measured":
            speeds = MeasuredSpeeds(group.rank, 0, SPARE_WINDOWS, self._engine.gather)
        self._windows, self._speeds = RankWindows(self.plan, group.rank, speeds=speeds), speeds
        self._batches = self._engine.batches(
            micro_batch
            for update in range(10**6)
            for micro_batch in self._windows.window(update).micro_batches
        )

    @property
    def model(self) -> nn.Module:
        return self._engine.model

    def update(self, number: int) -> None:
        began = time.perf_counter()
        window = self._windows.window(number)
        self._engine.begin_window(window)
        for micro_batch in window.micro_batches:
            self._engine.micro_step(next(self._batches), micro_batch)
        report = self._engine.boundary()
        if self._speeds is not None:
            worked_s = time.perf_counter() - began - report.wait_s - report.optimizer_s
            self._speeds.add(number, seconds=worked_s, cost=self._windows.cost(window))


class Ddp:
    """DDP with no_sync: the mean over all tokens of an update by one more all-reduce."""

    def __init__(self, job: DrawnTextModel, group: Any, plan: Plan) -> None:
        torch.manual_seed(0)
        self.job, self.rank, self.ranks, self.plan = job, group.rank, group.size, plan
        self.model = Transformer(WIDTH, LAYERS, HEADS, LONGEST, 0.0)
        self._ddp = DistributedDataParallel(self.model)
        self._optimizer = torch.optim.AdamW(self._ddp.parameters(), lr=RATE)

    def samples(self, number: int) -> list[int]:
        """Return the update's samples."""
        return self.plan.order.indices(number).tolist()

    def micro_batches(self, number: int) -> list[list[int]]:
        """Return this rank's: its samples as they come, in micro-batches of equal size."""
        own = self.samples(number)[self.rank :: self.ranks]
        return [own[at : at + SAMPLES_EACH] for at in range(0, len(own), SAMPLES_EACH)]

    def update(self, number: int) -> None:
        data = self.job.dataset()
        own = self.micro_batches(number)
        tokens = torch.tensor(float(sum(data.lengths[i] for part in own for i in part)))
        dist.all_reduce(tokens)
        self._optimizer.zero_grad()
        for step, part in enumerate(own, start=1):
            batch = self.job.collate([data[index] for index in part])
            self._ddp.require_backward_grad_sync = step == len(own)
            loss = self.job.loss(self._ddp, batch).total
            (loss * (self.ranks / tokens)).backward()
        self._optimizer.step()


class DdpEqual(Ddp):
    """The same samples: sorted by length, in equal numbers of micro-steps on all ranks, which cost
    as nearly the same as that allows.
    """

    def micro_batches(self, number: int) -> list[list[int]]:
        lengths, tokens = self.job.dataset().lengths, LONGEST * SAMPLES_EACH
        by_length = sorted(self.samples(number), key=lambda index: -lengths[index])
        padded = sum(lengths[index] for index in by_length)
        steps = max(2, -(-padded * 5 // 4 // tokens // self.ranks)) * self.ranks
        while True:  # the fewest that fit
            costs = [self.job.cost(lengths[index], 1) for index in by_length]
            counts = deal(costs, steps)
            firsts = [sum(counts[:step]) for step in range(steps)]
            pairs = zip(firsts, counts, strict=True)
            if all(lengths[by_length[first]] * count <= tokens for first, count in pairs if count):
                break
            steps += self.ranks
        parts = [by_length[f : f + c] for f, c in zip(firsts, counts, strict=True)]
        # Snake-wise, so that each rank has long and short ones.
        turn = [*range(self.ranks), *reversed(range(self.ranks))]
        return [
            part for step, part in enumerate(parts) if turn[step % len(turn)] == self.rank and part
        ]


class DdpGrouped(Ddp):
    """Other updates: samples grouped by length over all of them, as a loader does."""

    @cached_property
    def _groups(self) -> list[list[int]]:
        lengths = self.job.dataset().lengths
        whole = sorted(range(len(lengths)), key=lambda index: lengths[index])
        groups = [whole[at : at + SAMPLES_EACH] for at in range(0, len(whole), SAMPLES_EACH)]
        order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(0))
        return [groups[index] for index in order.tolist()]

    def micro_batches(self, number: int) -> list[list[int]]:
        count = self.plan.batch.global_batch // SAMPLES_EACH
        own = self._groups[number * count : (number + 1) * count]
        lengths = self.job.dataset().lengths
        # Dealt by length, so that ranks cost nearly the same.
        own = sorted(own, key=lambda group: -max(lengths[index] for index in group))
        turn = [*range(self.ranks), *reversed(range(self.ranks))]
        return [part for at, part in enumerate(own) if turn[at % len(turn)] == self.rank]


DDP, BY_NUMBER, EQUAL = "DDP + no_sync", "cut by number", "DDP, equal numbers of micro-steps"
BY_TOKENS, GROUPED = "`micro_tokens`", "DDP, grouped by length (other updates)"
MEASURED = "`micro_tokens`, `balance=measured`"
WARM_UP = 2
"""Updates: DDP arranges its buckets anew in the second."""


def measure(task: dict[str, Any], group: TorchGroup) -> list[dict[str, Any]]:
    """Return a row for each contender: seconds of its updates and their ratio to the first one's,
    by the clock and in processor time of the busiest rank.

    Args:
        task: `contenders`, `global_batch`, `updates` to measure, `warm_up` updates before, and
            `sigma` of the logarithm of lengths.
    """
    size, names, warm_up = task["global_batch"], task["contenders"], task["warm_up"]
    updates = warm_up + task["updates"]
    data = DrawnText(size * updates, task["sigma"])
    job, tokens = DrawnTextModel(data), LONGEST * SAMPLES_EACH
    by_tokens = Ours(job, group, size, micro_tokens=tokens)
    plan = by_tokens.plan
    build = {
        DDP: lambda: Ddp(job, group, plan),
        BY_NUMBER: lambda: Ours(job, group, size, micro_batch=tokens // max(data.lengths)),
        EQUAL: lambda: DdpEqual(job, group, plan),
        BY_TOKENS: lambda: by_tokens,
        MEASURED: lambda: Ours(job, group, size, micro_tokens=tokens, balance="measured"),
        GROUPED: lambda: DdpGrouped(job, group, plan),
    }
    contenders: dict[str, Any] = {name: build[name]() for name in names}
    for contender in contenders.values():
        contender.model.load_state_dict(by_tokens.model.state_dict())
    seconds: dict[str, list[float]] = {name: [] for name in names}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in names}
    for number, turn in enumerate(turns(names, updates)):
        for name in turn:
            dist.barrier()
            began, cpu_began = time.perf_counter(), time.process_time()
            contenders[name].update(number)
            busiest = torch.tensor(time.process_time() - cpu_began)
            dist.all_reduce(busiest, dist.ReduceOp.MAX)
            if number >= warm_up:
                seconds[name].append(time.perf_counter() - began)
                cpu_seconds[name].append(float(busiest))
    # Updates differ in length: sums are compared, not medians of updates.
    rows = rows_of({name: [sum(spent)] for name, spent in seconds.items()}, names[0])
    reference = contenders[names[0]].model
    for row in rows:
        name = row["name"]
        pairs = zip(reference.parameters(), contenders[name].model.parameters(), strict=True)
        row["difference"] = max(float((one - other).abs().max()) for one, other in pairs)
        row["update_ms"] = 1000 * sum(seconds[name]) / len(seconds[name])
        row["cpu_ratio"] = sum(cpu_seconds[name]) / sum(cpu_seconds[names[0]])
    return rows
