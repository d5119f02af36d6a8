"""MindSpore: `jit` against PyNative, and our loop against a bare hand-written one at the same work.

One rank, the MLP 784-512-512-10, an update of four micro-steps of 8 samples, SGD. The bare loop is
what a user writes: `value_and_grad` and an accumulating `assign_add` under `jit`, a compiled
boundary that divides and steps; it reads the loss once an update, as ours does. Batches are made
beforehand for both.
"""

from __future__ import annotations

import itertools
import os
import time

os.environ.setdefault("GLOG_v", "3")  # before MindSpore's import

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.experimental import optim

from benchmarks.measure import interleaved, keep, machine, rows_of
from orchestrator import Job, Loss
from orchestrator.engine.api import EngineSettings, MicroBatch, Window
from orchestrator.engine.mindspore.engine import build_engine
from orchestrator.engine.mindspore.group import MindSporeGroup

LAYERS = (784, 512, 512, 10)
STEPS, SIZE, UPDATES, REPETITIONS = 4, 8, 50, 7
RATE = 0.01
REFERENCE = "bare loop, jit"


def net() -> nn.Cell:
    parts: list[nn.Cell] = []
    for inputs, outputs in itertools.pairwise(LAYERS):
        parts += [nn.Dense(inputs, outputs), nn.ReLU()]
    return nn.SequentialCell(parts[:-1])


def samples() -> list[tuple[np.ndarray, np.int32]]:
    draw = np.random.default_rng(0)
    pixels = draw.uniform(size=(STEPS * SIZE, LAYERS[0])).astype(np.float32)
    return [(row, np.int32(index % LAYERS[-1])) for index, row in enumerate(pixels)]


def batches() -> list[tuple[Tensor, Tensor]]:
    pixels, labels = (np.stack(column) for column in zip(*samples(), strict=True))
    cuts = [slice(k * SIZE, (k + 1) * SIZE) for k in range(STEPS)]
    return [(Tensor(pixels[cut]), Tensor(labels[cut])) for cut in cuts]


class Mlp(Job):
    """The same work as the bare loop's."""

    framework = "mindspore"

    def model(self) -> nn.Cell:
        return net()

    def dataset(self) -> list[tuple[np.ndarray, np.int32]]:
        return samples()

    def loss(self, model: nn.Cell, batch: tuple[Tensor, Tensor]) -> Loss:
        pixels, labels = batch
        total = ops.cross_entropy(model(pixels), labels, reduction="sum")
        return Loss(total, weight=len(labels))


class Ours:
    """The engine, driven as the training loop drives it."""

    def __init__(self, mode: str) -> None:
        group = MindSporeGroup(rank=0, size=1, transport="mccl")
        self.engine = build_engine(Mlp(), EngineSettings(mode=mode), group)
        self.batches = batches()
        self.update = 0

    def seconds(self) -> float:
        """Return milliseconds an update."""
        began = time.perf_counter()
        for _ in range(UPDATES):
            work = tuple(
                MicroBatch(
                    update=self.update,
                    positions=range(k * SIZE, (k + 1) * SIZE),
                    indices=tuple(range(SIZE)),
                )
                for k in range(STEPS)
            )
            self.engine.begin_window(
                Window(
                    update=self.update,
                    samples=STEPS * SIZE,
                    micro_batches=work,
                    steps=STEPS,
                    learning_rate=RATE,
                )
            )
            for batch, one in zip(self.batches, work, strict=True):
                self.engine.micro_step(batch, one)
            self.engine.boundary()
            self.update += 1
        return 1e3 * (time.perf_counter() - began) / UPDATES


class Bare:
    """Written by hand."""

    def __init__(self) -> None:
        model = net()
        parameters = tuple(model.trainable_params())
        optimizer = optim.SGD(list(parameters), lr=RATE)
        sums = tuple(
            Parameter(ops.zeros_like(p), name=f"bare.{p.name}", requires_grad=False)
            for p in parameters
        )

        def forward(pixels: Tensor, labels: Tensor) -> Tensor:
            return ops.cross_entropy(model(pixels), labels, reduction="sum")

        gradient = ms.value_and_grad(forward, None, parameters)

        @ms.jit
        def micro_step(pixels: Tensor, labels: Tensor) -> Tensor:
            loss, parts = gradient(pixels, labels)
            for held, part in zip(sums, parts):  # noqa: B905  # no strict in graphs
                ops.assign_add(held, part)
            return loss

        @ms.jit
        def boundary(factor: Tensor) -> bool:
            averaged = ()
            for held in sums:
                averaged = (*averaged, held * factor)
            optimizer(averaged)
            for held in sums:
                ops.assign(held, ops.zeros_like(held))
            return True

        self.micro_step, self.boundary, self.batches = micro_step, boundary, batches()

    def seconds(self) -> float:
        """Return milliseconds an update."""
        factor = Tensor(1.0 / (STEPS * SIZE), ms.float32)
        began = time.perf_counter()
        for _ in range(UPDATES):
            losses = [self.micro_step(*batch) for batch in self.batches]
            sum(float(loss.asnumpy()) for loss in losses)
            self.boundary(factor)
        return 1e3 * (time.perf_counter() - began) / UPDATES


def main(*, quick: bool = False) -> None:
    found = machine()
    contenders = {
        REFERENCE: Bare().seconds,
        "ours, engine.mode=jit": Ours("jit").seconds,
        "ours, engine.mode=pynative": Ours("pynative").seconds,
    }
    figures = interleaved(contenders, 3 if quick else REPETITIONS)
    part = {
        "heading": "",
        "reference": REFERENCE,
        "figures": {"ms an update": rows_of(figures, REFERENCE)},
    }
    layers = "-".join(map(str, LAYERS))
    note = f"{STEPS} micro-steps of {SIZE} samples, the MLP {layers}, SGD, one rank."
    title = "MindSpore: an update of four micro-steps"
    data = {"title": title, "machine": found, "note": note, "parts": [part]}
    keep("mindspore_steps", data, quick=quick)
