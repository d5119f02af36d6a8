"""The two libraries that people put on top of DDP. Imported only when they take part.

Both are told that the process group exists already, and to keep gradients as views of DDP's
buckets, which is off by default in both.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from benchmarks.contenders.base import Contender, Setting
from benchmarks.workload import Batch, mean_loss


class HuggingFaceAccelerate(Contender):
    """`accelerator.accumulate(model)`, which also divides the loss and skips optimizer steps."""

    name = "Accelerate"
    needs = "accelerate"

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        import accelerate

        self._accelerator = accelerate.Accelerator(
            cpu=True,
            kwargs_handlers=[
                accelerate.DistributedDataParallelKwargs(gradient_as_bucket_view=True)
            ],
        )
        prepared: Any = self._accelerator.prepare(model, setting.optimizer(model))
        self._model, self._optimizer = prepared
        ranks = self._accelerator.num_processes
        if ranks != setting.group.size:
            raise RuntimeError(f"Accelerate sees {ranks} ranks, but there are {setting.group.size}")

    def begin(self, *, steps: int, first: int, leaves: int) -> None:
        del first, leaves
        self._accelerator.gradient_accumulation_steps = steps
        self._accelerator.step = 0

    def micro_step(self, batch: Batch, step: int, *, last: bool) -> Tensor:
        del step, last
        with self._accelerator.accumulate(self._model):
            loss = mean_loss(self._model, batch)
            self._accelerator.backward(loss)
            self._optimizer.step()
            self._optimizer.zero_grad()
        return loss

    def end(self) -> None:
        """Do nothing: `accumulate` let the last micro-step's `step` through."""


class Fabric(Contender):
    """`fabric.no_backward_sync`, `fabric.backward`."""

    name = "Lightning Fabric"
    needs = "lightning_fabric"

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        import lightning_fabric
        from lightning_fabric.plugins.environments import TorchElasticEnvironment
        from lightning_fabric.strategies import DDPStrategy

        self._fabric = lightning_fabric.Fabric(
            accelerator="cpu",
            devices=1,
            num_nodes=setting.group.size,
            strategy=DDPStrategy(gradient_as_bucket_view=True),
            plugins=[TorchElasticEnvironment()],
        )
        self._fabric.launch()
        self._model, self._optimizer = self._fabric.setup(model, setting.optimizer(model))
        ranks = self._fabric.world_size
        if ranks != setting.group.size:
            raise RuntimeError(f"Fabric sees {ranks} ranks, but there are {setting.group.size}")
        self._steps = 1

    def begin(self, *, steps: int, first: int, leaves: int) -> None:
        del first, leaves
        self._steps = steps

    def micro_step(self, batch: Batch, step: int, *, last: bool) -> Tensor:
        del step
        with self._fabric.no_backward_sync(self._model, enabled=not last):
            loss = mean_loss(self._model, batch)
            self._fabric.backward(loss / self._steps)
        return loss

    def end(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()
