"""A pipeline (GPipe) against the same update without stages, on as many processes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from benchmarks.measure import keep, machine, rows_of
from benchmarks.sharded import timed_together
from orchestrator import Accumulator, Loss, TorchGroup
from orchestrator.engine.torch.group import BaseGroup
from orchestrator.local_ranks.processes import run_ranks

WIDE, LAYERS, MICRO_BATCHES, SAMPLES = 512, 16, 8, 32
PIPED, WHOLE = "stages", "the whole model on each rank"
SHAPES = ((1, 2), (2, 2), (1, 4))
NOTE = f"""\
Seconds of an update of {MICRO_BATCHES} micro-batches of {SAMPLES} samples for each copy of the
stages; {LAYERS} layers of {WIDE} x {WIDE}, AdamW, clipping by the whole model's norm, loopback
gloo, one thread a process, in turn in the same processes. Without stages, each of as many ranks
holds the whole model and takes its share of the same samples. The bubble, the part of the time in
which a stage has nothing to do, is (S - 1) / (m + S - 1) of S stages and m micro-batches (Huang et
al. 2019, GPipe, arXiv 1811.06965): stages pay where a model does not fit, not for speed. Where
there are more processes than processors, others use the time of a bubble."""


def bubble(stages: int) -> float:
    """Return the part of a pipeline's time in which a stage waits.

    >>> round(bubble(2), 2), round(bubble(4), 2)
    (0.11, 0.27)
    """
    return (stages - 1) / (MICRO_BATCHES + stages - 1)


def _layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU()) for _ in range(count)))


def _sum_of_squares(y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return y.square().sum()


def _measure(
    group: BaseGroup, folder: str, shape: tuple[int, int], repetitions: int
) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/met", rank=group.rank, world_size=group.size
    )
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "stage"))
    stages = shape[1]
    number = mesh.get_local_rank("stage")
    torch.manual_seed(number)
    part, whole = _layers(LAYERS // stages), _layers(LAYERS)
    options: dict[str, Any] = {"clip_norm": 1.0, "warn_about_layers": False}
    of_stage = Accumulator(
        part,
        torch.optim.AdamW(part.parameters(), lr=1e-4),
        TorchGroup.wrap(mesh.get_group("replica")),
        model_group=TorchGroup.wrap(mesh.get_group("stage")),
        **options,
    )
    of_whole = Accumulator(
        whole,
        torch.optim.AdamW(whole.parameters(), lr=1e-4),
        TorchGroup.wrap(dist.group.WORLD),
        broadcast=True,
        **options,
    )
    stage = PipelineStage(part, number, stages, torch.device("cpu"), group=mesh.get_group("stage"))
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=_sum_of_squares, scale_grads=False)
    x = torch.randn(MICRO_BATCHES * SAMPLES, WIDE)
    mine = x.tensor_split(stages)[number]  # with as many samples an update as the pipeline

    def piped() -> None:
        of_stage.begin_window()
        losses: list[torch.Tensor] = []
        total = torch.zeros((), requires_grad=True)
        if number == 0:
            schedule.step(x)
        elif number < stages - 1:
            schedule.step()
        else:
            schedule.step(target=x, losses=losses)
            total = torch.stack(losses).sum()
        of_stage.record(Loss(total, weight=len(x)))
        of_stage.boundary()

    def unpiped() -> None:
        batches = mine.split(SAMPLES)
        for step, batch in enumerate(batches, start=1):
            loss = Loss(whole(batch).square().sum(), len(batch))
            of_whole.backward(loss, last=step == len(batches))
        of_whole.boundary()

    return timed_together({PIPED: piped, WHOLE: unpiped}, repetitions)


def main(*, quick: bool = False) -> None:
    parts: list[dict[str, Any]] = []
    for shape in SHAPES[:1] if quick else SHAPES:
        replicas, stages = shape
        with tempfile.TemporaryDirectory() as folder:
            given = folder, shape, 5 if quick else 41
            times = run_ranks(replicas * stages, Path(folder), _measure, *given, timeout_s=300.0)[0]
        samples = replicas * MICRO_BATCHES * SAMPLES
        copies = "one copy" if replicas == 1 else f"{replicas} copies"
        heading = (
            f"{stages} stages, {copies}: {samples} samples an update, "
            f"bubble {100 * bubble(stages):.0f} %"
        )
        parts.append({"heading": heading, "figures": {"s": rows_of(times, WHOLE)}})
    data = {"title": "A pipeline", "machine": machine(), "note": NOTE, "parts": parts}
    keep("pipeline", data, quick=quick)
