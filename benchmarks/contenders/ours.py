"""Ours: the accumulator as a library, with one reduction an update."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from benchmarks.contenders.base import Contender, Setting
from benchmarks.workload import Batch, total_loss
from orchestrator.engine.torch import Accumulator, Loss


class Ours(Contender):
    """`accumulation.reduction=fast`."""

    name = "ours"
    reduction: ClassVar[str] = "fast"
    shard_optimizer: ClassVar[bool] = False

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        self._model, self._first = model, 0
        self._weight: int | None = None  # of a micro-batch: the same for all, as in `workload`
        self.accumulator = Accumulator(
            model,
            setting.optimizer(model),
            setting.group,
            reduction=self.reduction,
            shard_optimizer=self.shard_optimizer,
        )

    def begin(self, *, steps: int, first: int, leaves: int) -> None:
        del steps
        self._first = first
        expected = None if self._weight is None else float(self._weight * leaves)
        self.accumulator.begin_window(leaves=leaves, expected_weight=expected)

    def micro_step(self, batch: Batch, step: int, *, last: bool) -> Tensor:
        total = total_loss(self._model, batch)
        self._weight = len(batch[1])
        self.accumulator.backward(Loss(total, self._weight), last=last, leaf=self._first + step)
        return total / self._weight

    def end(self) -> None:
        self.accumulator.boundary()


class OursReproducible(Ours):
    """`accumulation.reduction=reproducible`."""

    name = "ours, reproducible"
    reduction = "reproducible"


class OursSharded(Ours):
    """`engine.shard_optimizer=true`."""

    name = "ours, sharded optimizer"
    shard_optimizer = True
