"""One process of `benchmarks.overhead`: `python overhead_rank.py KIND STEPS UPDATES FILE`.

The same update by hand, with the accumulator, and in our windows; and a job class that does it.
Each notes the processor time after every update, of all of its threads.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from orchestrator import Accumulator, Job, Loss, TorchGroup
from orchestrator import current_run as run
from orchestrator.plan.order import DataOrder

WIDE, LAYERS, SAMPLES, DATA = 64, 24, 16, 2048
RATE, CLIP_NORM = 1e-4, 1.0


def net() -> nn.Module:
    """Return the model: 24 small layers, whose own work does not hide what is around it."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh()) for _ in range(LAYERS)))


def data() -> tuple[Tensor, Tensor]:
    """Return inputs and targets."""
    draw = torch.Generator().manual_seed(1)
    return torch.randn(DATA, WIDE, generator=draw), torch.randn(DATA, WIDE, generator=draw)


def total(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of squares."""
    return (model(x) - y).square().sum()


class Overhead(Job):
    """The update as a job class.

    Args:
        file: gets the processor time after each update.
        updates: of the run.
    """

    def __init__(self, file: str, updates: int) -> None:
        self.file, self.updates, self.times = Path(file), updates, list[float]()

    def model(self) -> nn.Module:
        return net()

    def dataset(self) -> TensorDataset:
        return TensorDataset(*data())

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(total(model, x, y), weight=len(x))

    def after_update(self, model: nn.Module, update: int) -> None:
        del model, update
        self.times.append(time.process_time())
        if len(self.times) == self.updates:
            self.file.write_text(json.dumps(self.times), encoding="utf-8")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


def by_hand(steps: int, updates: int, done: Callable[[], None]) -> None:
    """Accumulate as one writes it: a mean divided by K, clipping, one step."""
    model, (x, y) = net(), data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    order = DataOrder(dataset_samples=DATA, global_batch=steps * SAMPLES)
    for update in range(updates):
        optimizer.zero_grad()
        for rows in torch.from_numpy(order.indices(update)).split(SAMPLES):
            (total(model, x[rows], y[rows]) / (steps * SAMPLES)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        done()


def accumulator_of(model: nn.Module) -> Accumulator:
    """Return the accumulator of one rank, with the optimizer and the clipping of `by_hand`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    return Accumulator(model, optimizer, TorchGroup.alone(), clip_norm=CLIP_NORM)


def with_accumulator(steps: int, updates: int, done: Callable[[], None]) -> None:
    """Use the accumulator alone."""
    model, (x, y) = net(), data()
    accumulator = accumulator_of(model)
    order = DataOrder(dataset_samples=DATA, global_batch=steps * SAMPLES)
    for update in range(updates):
        parts = torch.from_numpy(order.indices(update)).split(SAMPLES)
        for step, rows in enumerate(parts, start=1):
            loss = Loss(total(model, x[rows], y[rows]), weight=len(rows))
            accumulator.backward(loss, last=step == steps)
        accumulator.boundary()
        done()


def in_windows(steps: int, updates: int, done: Callable[[], None]) -> None:
    """Use `run.windows`."""
    model, (x, y) = net(), data()
    accumulator = accumulator_of(model)
    epochs = -(-updates * steps * SAMPLES // DATA) + 1
    windows = run.windows(
        DATA, accumulator, global_batch=steps * SAMPLES, micro_batch=SAMPLES, epochs=epochs
    )
    for window in windows:
        for rows in window:
            accumulator.backward(Loss(total(model, x[rows], y[rows]), weight=len(rows)))
        accumulator.boundary()
        done()
        if window.update + 1 == updates:
            break


KINDS = {"by_hand": by_hand, "accumulator": with_accumulator, "windows": in_windows}


def main() -> None:
    kind, steps, updates, file = sys.argv[1:]
    torch.set_num_threads(1)
    times: list[float] = []
    KINDS[kind](int(steps), int(updates), lambda: times.append(time.process_time()))
    Path(file).write_text(json.dumps(times), encoding="utf-8")


if __name__ == "__main__":
    main()
