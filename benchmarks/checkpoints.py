"""Cost of a checkpoint for the training, synchronous and in the background."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.markdown import grid, spread_cells
from benchmarks.measure import interleaved, keep, machine, rows_of
from orchestrator import Job, Loss
from orchestrator.client.checkpoint_manager import CheckpointManager
from orchestrator.engine.api import EngineSettings, MicroBatch, Window
from orchestrator.engine.torch import TorchEngine, TorchGroup
from orchestrator.engine.torch.state import Snapshot

AT_ONCE, BACKGROUND = "on the spot", "in the background"
WIDTH, BATCH, WINDOWS = 3072, 32, 8
NOTE = f"""\
A net of 3 layers of {WIDTH}, in float32 with Adam, on one rank and the CPU: {WINDOWS} updates,
after the first a checkpoint. What counts is for how long the main thread stands still: in the call,
and until the next boundary may change the weights. Where training uses all processors, as here, the
writer takes some of them besides; on an accelerator it does not."""


class Net(Job):
    """Large weights, little to compute."""

    def model(self) -> nn.Module:
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        return nn.Sequential(*layers)

    def dataset(self) -> TensorDataset:
        return TensorDataset(torch.randn(BATCH, WIDTH))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(model(batch[0]).square().mean(1).sum(), len(batch[0]))


class Timed:
    """An engine whose copy is looked at."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine, self.kept = engine, None
        self.save_state = engine.save_state

    def snapshot(self) -> Snapshot:
        self.kept = self._engine.snapshot()
        return self.kept


def body(data: dict[str, Any]) -> str:
    """Return the page: a line for each way."""
    head = [
        "a checkpoint is written",
        "training stands still (s)",
        "quartiles",
        "ratio",
        "quartiles",
    ]
    lines: list[list[str]] = []
    for row in data["rows"]:
        cells = [*spread_cells(row["spread"], ".3f"), *spread_cells(row["ratio"], ".3f")]
        lines.append([row["name"], *cells])
    return f"{NOTE}\n\n{grid(head, lines)}"


def _window(update: int) -> Window:
    one = MicroBatch(update=update, positions=range(BATCH), indices=tuple(range(BATCH)))
    return Window(
        update=update,
        samples=BATCH,
        micro_batches=(one,),
        steps=1,
        learning_rate=1e-4,
        samples_per_rank=(BATCH,),
    )


class Training:
    """Some updates at a time, of one engine."""

    def __init__(self) -> None:
        group = TorchGroup.alone()
        settings = EngineSettings(optimizer={"name": "adam"})
        self._engine, self._update = TorchEngine(Net(), settings, group), 0

    def stands_still(self, way: str) -> float:
        """Return for how many seconds one checkpoint stops training. `way`: how it is written."""
        timed, still = Timed(self._engine), 0.0
        folder = Path(tempfile.mkdtemp(prefix="checkpoints-"))
        part: Any = timed  # the part of an engine that is used
        saving = CheckpointManager(folder, part, run=None, keep=1, background=way == BACKGROUND)
        for number in range(WINDOWS):
            one = _window(self._update)
            self._engine.begin_window(one)
            for batch in self._engine.batches(one.micro_batches):
                self._engine.micro_step(batch, one.micro_batches[0])
            still += _seconds(timed.kept.taken.wait) if timed.kept else 0.0
            self._engine.boundary()
            self._update += 1
            if number == 0:
                still += _seconds(partial(saving.on_checkpoint, 1, 1))
        saving.wait()
        if saving.unsaved is not None:
            raise RuntimeError(saving.unsaved)
        shutil.rmtree(folder)
        return still


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main(*, quick: bool = False) -> None:
    training = Training()
    ways = {way: partial(training.stands_still, way) for way in (AT_ONCE, BACKGROUND)}
    figures = interleaved(ways, 3 if quick else 15)
    keep("checkpoints", {"machine": machine(), "rows": rows_of(figures, AT_ONCE)}, quick=quick)
