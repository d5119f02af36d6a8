"""An update of a model in shards against the same switches set by hand (FSDP2 and HSDP)."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.measure import keep, machine, rows_of
from orchestrator import Loss
from orchestrator.engine.torch import Accumulator
from orchestrator.engine.torch.group import BaseGroup
from orchestrator.testing.processes import run_ranks

STEPS, SAMPLES, WIDE, LAYERS = 4, 16, 512, 8
OURS, BY_HAND = "ours", "fully_shard by hand"
SHAPES = ((2, 2), (2,), (2, 1))
NOTE = f"""\
Seconds of an update of {STEPS} micro-steps of {SAMPLES} samples, {LAYERS} layers of {WIDE} x
{WIDE} (2.1 million parameters), AdamW and clipping, loopback gloo, in turn in the same processes.
By hand: `set_requires_all_reduce(last)`, the mean divided by K, `clip_grad_norm_`. A mesh of
(2, 2) is two copies of two ranks each. Ours reduces between copies after the last backward, and
not during it."""


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

    def seconds(update: Any) -> float:
        dist.barrier()
        began = time.perf_counter()
        update()
        dist.barrier()
        return time.perf_counter() - began

    updates = {OURS: ours, BY_HAND: by_hand}
    for update in updates.values():
        seconds(update)
    found = {name: list[float]() for name in updates}
    for number in range(repetitions):  # all ranks in the same order
        for name in list(updates)[:: 1 if number % 2 else -1]:
            found[name].append(seconds(updates[name]))
    dist.destroy_process_group()
    return found


def main(*, quick: bool = False) -> None:
    parts: list[dict[str, Any]] = []
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            ranks = shape[0] * (shape[1] if len(shape) > 1 else 1)
            given = folder, shape, 7 if quick else 101
            figures = run_ranks(ranks, Path(folder), _measure, *given, timeout_s=300.0)[0]
        parts.append({"heading": f"Mesh {shape}", "figures": {"s": rows_of(figures, BY_HAND)}})
    data = {"title": "Models in shards", "machine": machine(), "note": NOTE, "parts": parts}
    keep("sharded", data, quick=quick)
