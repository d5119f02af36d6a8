"""An update of a model in shards against the same switches set by hand (FSDP2 and HSDP)."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.markdown import grid
from benchmarks.measure import keep, machine, rows_of
from orchestrator import Loss
from orchestrator.engine.torch import Accumulator
from orchestrator.engine.torch.buffers import GradientBuffers
from orchestrator.engine.torch.fully_sharded import FullySharded
from orchestrator.engine.torch.group import BaseGroup
from orchestrator.engine.torch.owners import Ownership
from orchestrator.engine.torch.sharding import OptimizerShard, ShardedReduction
from orchestrator.engine.torch.transports import TorchGroup
from orchestrator.local_ranks.processes import run_ranks
from orchestrator.plan.batch import Batch
from orchestrator.plan.order import DataOrder
from orchestrator.plan.schedule import Schedule
from orchestrator.plan.window import WindowPlanner

STEPS, SAMPLES, WIDE, LAYERS = 4, 16, 512, 8
OURS, BY_HAND = "ours", "fully_shard by hand"
SHAPES = ((2, 2), (2,), (2, 1))
NOTE = f"""\
Seconds of an update of {STEPS} micro-steps of {SAMPLES} samples, {LAYERS} layers of {WIDE} x
{WIDE} (2.1 million parameters), AdamW and clipping, loopback gloo, in turn in the same processes.
By hand: `set_requires_all_reduce(last)`, the mean divided by K, `clip_grad_norm_`. A mesh of
(2, 2) is two copies of two ranks each. Ours reduces between copies after the last backward, and
not during it."""
MANY = 9600
LARGE = f"""\
One rank of {MANY:,} builds its buffers, its reduction and its first window for 1.26 billion
parameters (on torch's fake process group; the sharded model itself exists before). The buffers take
memory with the first backward: this rank's part of the float32 gradient, 601 MiB of 8 ranks."""
LARGE_SHAPES = {
    "whole on each rank, optimizer in shards (on the meta device)": None,
    "in shards over all ranks": MANY,
    "in shards over 64 ranks, 150 copies": 64,
    "in shards over 8 ranks, 1,200 copies": 8,
}


def _sharded(mesh: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU()) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _measure(
    group: BaseGroup, folder: str, shape: tuple[int, ...], repetitions: int
) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/met", rank=group.rank, world_size=group.size
    )
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])
    mine, theirs = _sharded(mesh), _sharded(mesh)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-4, foreach=True) for m in (mine, theirs)]
    accumulator = Accumulator(mine, optimizers[0], clip_norm=1.0)
    x = torch.randn(SAMPLES, WIDE)

    def ours() -> None:
        for step in range(STEPS):
            loss = Loss(mine(x).square().sum(), SAMPLES)
            accumulator.backward(loss, last=step == STEPS - 1)
        accumulator.boundary()

    def by_hand() -> None:
        for step in range(STEPS):
            theirs.set_requires_all_reduce(step == STEPS - 1)
            (theirs(x).square().sum() / SAMPLES / STEPS).backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizers[1].step()
        optimizers[1].zero_grad()

    return timed_together({OURS: ours, BY_HAND: by_hand}, repetitions)


def timed_together(
    updates: Mapping[str, Callable[[], None]], repetitions: int
) -> dict[str, list[float]]:
    """Return the seconds of updates that all ranks of torch's group take together, in turn; and
    destroy the group.
    """

    def seconds(update: Callable[[], None]) -> float:
        dist.barrier()
        began = time.perf_counter()
        update()
        dist.barrier()
        return time.perf_counter() - began

    for update in updates.values():
        seconds(update)
    times = {name: list[float]() for name in updates}
    for repetition in range(repetitions):  # all ranks in the same order
        for name in list(updates)[:: 1 if repetition % 2 else -1]:
            times[name].append(seconds(updates[name]))
    dist.destroy_process_group()
    return times


class _Layer(nn.Module):
    """The parameters of a transformer's layer; it computes nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.Linear(width, 4 * width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


def _build_large(_: BaseGroup, shards: int | None) -> tuple[float, float]:
    """Build the reduction and the first window of one of MANY ranks; no rank but this exists.

    Args:
        shards: ranks that hold one copy of the model (`fully_shard`); None: each rank holds the
            whole model and a part of the optimizer's state.
    """
    dist.init_process_group("fake", rank=0, world_size=MANY, store=FakeStore())
    with torch.device("meta"):  # weights without memory
        model = nn.Sequential(*(_Layer(2048) for _ in range(25)))
    if shards is not None:
        mesh = init_device_mesh(
            "cpu", (MANY // shards, shards), mesh_dim_names=("copies", "shards")
        )
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
    group = TorchGroup.wrap(dist.group.WORLD, device="meta" if shards is None else "cpu")
    named = list(model.named_parameters())
    resident, began = _mib("VmRSS:"), time.perf_counter()
    if shards is None:
        buffers = GradientBuffers(named, pad_to=MANY, move_weights=True)
        reduction = ShardedReduction(buffers, group, None, overlap=False, owners=Ownership())
        OptimizerShard(torch.optim.AdamW(model.parameters()), reduction, group)
    else:
        FullySharded(model, named, group).reduction(named, None).begin(None)
    planner = WindowPlanner(
        order=DataOrder(seed=0, dataset_samples=10**9, global_batch=4 * MANY + 1),
        schedule=Schedule(base_lr=0.1, global_batch=4 * MANY + 1),
        batch=Batch(global_batch=4 * MANY + 1, steps=4, micro_batch_cap=None),
        ranks=MANY,
    )
    planner.window(0, 0)
    seconds = time.perf_counter() - began
    return seconds, _mib("VmHWM:") - resident


def _mib(field: str) -> float:
    """Return a figure of this process's memory, by its name in /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def main(*, quick: bool = False) -> None:
    parts: list[dict[str, Any]] = []
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            ranks = shape[0] * (shape[1] if len(shape) > 1 else 1)
            given = folder, shape, 7 if quick else 101
            figures = run_ranks(ranks, Path(folder), _measure, *given, timeout_s=300.0)[0]
        parts.append({"heading": f"Mesh {shape}", "figures": {"s": rows_of(figures, BY_HAND)}})
    lines: list[list[str]] = []
    for name, shards in LARGE_SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            seconds, mib = run_ranks(1, Path(folder), _build_large, shards)[0]
        lines.append([name, f"{seconds:.2f}", f"{mib:.0f}"])
    large = f"{LARGE}\n\n{grid(['model', 'seconds', 'MiB'], lines)}"
    data = {"title": "Models in shards", "machine": machine(), "note": NOTE, "parts": parts}
    keep("sharded", {**data, "more": [large]}, quick=quick)
