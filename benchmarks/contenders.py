"""One update of K micro-steps, done by us and by what people use today, on the same model and data.

All average over the micro-batches of all ranks, which are equally large here: the only case in
which DDP's mean of means is right. Each contender has its own copy of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from jobs.digits import Digits
from jobs.language_model import Transformer
from orchestrator.engine.torch import Accumulator, Loss, TorchGroup

Batch = tuple[Tensor, Tensor]
Update = Callable[[Sequence[Batch], int], None]
"""Takes this rank's micro-batches and the number of the first one in the update."""


def model_and_batch(name: str) -> tuple[nn.Module, Batch]:
    """The model, and one micro-batch that serves all steps."""
    torch.manual_seed(0)
    if name == "mlp":
        layers = [part for _ in range(8) for part in (nn.Linear(1024, 1024), nn.ReLU())]
        return nn.Sequential(*layers), (torch.randn(32, 1024), torch.randint(0, 1024, (32,)))
    if name == "transformer":
        tokens = torch.randint(1, 256, (4, 64))
        return Transformer(128, 4, 4, 128, 0.0), (tokens, tokens.flatten())
    return Digits().model(), (torch.rand(16, 784), torch.randint(0, 10, (16,)))


def _total(model: nn.Module, batch: Batch) -> Tensor:
    scores = model(batch[0])
    return functional.cross_entropy(scores.flatten(0, -2), batch[1], reduction="sum")


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def ours(model: nn.Module, group: TorchGroup, reduction: str = "fast") -> Update:
    """The accumulator."""
    optimizer = _optimizer(model)
    accumulator = Accumulator(model, optimizer, group, reduction=reduction)

    def update(batches: Sequence[Batch], first: int, leaves: int | None = None) -> None:
        accumulator.begin_window(leaves=leaves)
        for number, batch in enumerate(batches):
            loss = Loss(_total(model, batch), weight=len(batch[1]))
            accumulator.backward(loss, last=number == len(batches) - 1, leaf=first + number)
        accumulator.boundary()

    return update


def ddp(model: nn.Module, *, no_sync: bool) -> Update:
    """DistributedDataParallel, synchronising every micro-step, or the last one alone."""
    wrapped: Any = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = _optimizer(model)

    def update(batches: Sequence[Batch], first: int) -> None:
        del first
        for number, batch in enumerate(batches):
            quiet = no_sync and number < len(batches) - 1
            with wrapped.no_sync() if quiet else nullcontext():
                (_total(wrapped, batch) / len(batch[1]) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def fsdp2(model: nn.Module) -> Update:
    """fully_shard with gradient sync off until the last micro-step."""
    wrapped: Any = fully_shard(model, reshard_after_forward=False)
    optimizer = _optimizer(model)

    def update(batches: Sequence[Batch], first: int) -> None:
        del first
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            wrapped.set_requires_gradient_sync(last)
            wrapped.set_reshard_after_backward(last)  # or weights are gathered every micro-step
            (_total(wrapped, batch) / len(batch[1]) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def contenders(names: Sequence[str], model: nn.Module, group: TorchGroup) -> dict[str, Any]:
    """The named ones, each with a copy of the model."""
    make: dict[str, Callable[[nn.Module], Update]] = {
        "ours": lambda m: ours(m, group),
        "ours, reproducible": lambda m: ours(m, group, "reproducible"),
        "DDP + no_sync": lambda m: ddp(m, no_sync=True),
        "DDP plain": lambda m: ddp(m, no_sync=False),
        "FSDP2": fsdp2,
    }
    return {name: make[name](copy.deepcopy(model)) for name in names}
