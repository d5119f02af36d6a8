"""Contenders of torch itself: DistributedDataParallel and fully_shard."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders.base import Contender, Setting
from benchmarks.workload import Batch, mean_loss


class PlainLoop(Contender):
    """A loop without any tool, around a model that sends."""

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        self.model: Any = model
        self.optimizer = setting.optimizer(model)
        self.steps = 1

    def begin(self, *, steps: int, first: int, leaves: int) -> None:
        del first, leaves
        self.steps = steps

    def micro_step(self, batch: Batch, step: int, *, last: bool) -> Tensor:
        del step, last
        loss = mean_loss(self.model, batch)
        (loss / self.steps).backward()
        return loss

    def end(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class DdpNoSync(PlainLoop):
    """DDP with `no_sync` around all micro-steps but the last, gradients as views of the buckets."""

    name = "DDP + no_sync"
    quiet: ClassVar[bool] = True

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        super().__init__(model, setting)
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def micro_step(self, batch: Batch, step: int, *, last: bool) -> Tensor:
        with self.model.no_sync() if self.quiet and not last else nullcontext():
            return super().micro_step(batch, step, last=last)


class DdpPlain(DdpNoSync):
    """DDP that synchronises every micro-step: `no_sync` forgotten."""

    name = "DDP plain"
    quiet = False


class DdpChecked(DdpNoSync):
    """`DdpNoSync` with what ours does as well: the loss of all ranks, and a finite norm."""

    name = "DDP + no_sync, norm and loss"

    def begin(self, *, steps: int, first: int, leaves: int) -> None:
        super().begin(steps=steps, first=first, leaves=leaves)
        self._loss = torch.zeros(2)

    def micro_step(self, batch: Batch, step: int, *, last: bool) -> Tensor:
        loss = super().micro_step(batch, step, last=last)
        self._loss += torch.tensor([float(loss) * len(batch[1]), len(batch[1])])
        return loss

    def end(self) -> None:
        dist.all_reduce(self._loss)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if not math.isfinite(float(norm)) or not math.isfinite(float(self._loss[0])):
            raise RuntimeError("the loss or the gradient is not finite")
        super().end()


class Fsdp2(PlainLoop):
    """`fully_shard` on every layer and the whole, gradient sync off until the last micro-step.

    Weights stay gathered from the first forward of an update to its last backward: otherwise they
    would travel in every micro-step.
    """

    name = "FSDP2"

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        for layers in model.modules():
            if isinstance(layers, nn.Sequential):
                for layer in layers:
                    if any(True for _ in layer.parameters()):
                        fully_shard(layer, reshard_after_forward=False)
                break
        super().__init__(fully_shard(model, reshard_after_forward=False), setting)

    def micro_step(self, batch: Batch, step: int, *, last: bool) -> Tensor:
        self.model.set_requires_gradient_sync(last)
        self.model.set_reshard_after_backward(last)
        return super().micro_step(batch, step, last=last)
