"""`engine.style=framework`: MindSpore's own `GradAccumulation` inside `AutoParallel` with `hsdp`.

For comparison with the own accumulation, which is the default and can do more. What was found with
MindSpore 2.10 on CPU: it computes in one process only; without `hsdp` it runs and silently never
changes a weight, so `hsdp` is always on here; what it returns is the *sum* of the micro-batches'
losses and it steps with the sum of their gradients, so each micro-batch's loss is divided by the
whole window's samples before. Windows must therefore be alike: equal micro-batches, weights that
count samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import nn, ops
from mindspore.parallel.auto_parallel import AutoParallel
from mindspore.parallel.nn import GradAccumulation

from orchestrator.engine.api import BoundaryReport, MicroBatch, Window
from orchestrator.engine.common.seeding import derived_seed
from orchestrator.engine.mindspore.comm.process_group import MindSporeGroup
from orchestrator.engine.mindspore.engine import MindSporeEngine, nothing
from orchestrator.engine.mindspore.loss_sums import as_float
from orchestrator.engine.mindspore.model.building import seed_everything
from orchestrator.engine.mindspore.model.losses import Sums, compiled_loss, python_loss
from orchestrator.engine.mindspore.optimizers import set_rate
from orchestrator.engine.settings import EngineSettings
from orchestrator.errors import ConfigError, JobError, NonFiniteError
from orchestrator.job import Job

OPTIMIZERS: dict[str, Any] = {"sgd": nn.SGD}


class _Share(nn.Cell):
    """One micro-batch's share of the window's loss: its sum, divided by all samples."""

    def __init__(self, model: nn.Cell, loss: Callable[[Any, Any], Sums], samples: int) -> None:
        super().__init__(auto_prefix=False)
        self.model, self.loss, self.share = model, loss, 1.0 / samples

    def construct(self, *leaves: Any) -> Any:
        total, _, _ = self.loss(self.model, leaves)
        return total * self.share


class FrameworkEngine(MindSporeEngine):
    """An `Engine` whose micro-steps only collect; the boundary runs MindSpore's compiled step."""

    def __init__(self, job: Job, settings: EngineSettings, group: MindSporeGroup) -> None:
        self._batches: list[Any] = []
        self._cell: Any = None
        self._shape: tuple[int, int] | None = None
        self._first_s = 0.0
        super().__init__(job, settings, group)
        self._loss_of = compiled_loss(job)
        self._python_loss = python_loss(job)

    def _built_optimizer(self, own: Any, trainable: Sequence[Any]) -> Any:
        """TrainOneStepCell takes the optimizers of `mindspore.nn` only."""
        if own is not None:
            return own
        rest = {k: v for k, v in self._settings.optimizer.items() if k != "name"}
        name = str(self._settings.optimizer.get("name"))
        if name not in OPTIMIZERS:
            raise ConfigError(
                f"engine.style=framework knows optimizer=sgd, not {name}: mindspore.nn's Adam and "
                f"AdamW are not the papers'; try engine.style=own, or build one in the job"
            )
        return OPTIMIZERS[name](list(trainable), 1e-3, **rest)

    def begin_window(self, window: Window) -> None:
        self._window, self._batches = window, []
        set_rate(self._optimizer, window.learning_rate)

    def micro_step(self, batch: Any, micro_batch: MicroBatch) -> None:
        window = self._window
        if window is None or micro_batch.update != window.update:
            raise RuntimeError(f"a micro-step of update {micro_batch.update} in no window of it")
        leaves = batch if isinstance(batch, tuple) else (batch,)
        self._batches.append(leaves)

    def boundary(self, *, stop: bool = False) -> BoundaryReport:
        window = self._window
        if window is None:
            raise RuntimeError("a boundary without a window")
        began = time.perf_counter()
        whole = tuple(ops.concat(column) for column in zip(*self._batches, strict=True))
        first = self._cell is None
        self._prepare(window)
        seed_everything(derived_seed("step", self._settings.seed, window.update, 0))
        loss = as_float(self._cell(*whole))
        if loss != loss or abs(loss) == float("inf"):  # noqa: PLR0124  # NaN
            raise NonFiniteError(
                f"the loss became NaN or infinite in update {window.update}; MindSpore's own step "
                f"has changed the weights already: resume from the last checkpoint"
            )
        seconds = time.perf_counter() - began
        steps, self._window, self._batches = len(self._batches), None, []
        getattr(self._job, "after_update", nothing)(self._model, window.update)
        return BoundaryReport(
            update=window.update,
            loss=loss,
            weight=float(window.samples),
            stop_requested=stop,
            micro_steps=steps,
            compute_s=0.0 if first else seconds,
            compile_s=seconds if first else 0.0,
        )

    def _prepare(self, window: Window) -> None:
        sizes = {len(one.indices) for one in window.micro_batches}
        shape = (len(window.micro_batches), window.samples)
        if len(sizes) != 1 or (self._shape is not None and shape != self._shape):
            raise ConfigError(
                f"engine.style=framework needs windows of equal micro-batches, but update "
                f"{window.update} has {window.samples} samples in {len(window.micro_batches)} "
                f"micro-steps; try accumulation.ragged=drop, or engine.style=own"
            )
        if self._cell is not None:
            return
        total, weight, _ = self._python_loss(self._model, self._batches[0])
        del total
        if as_float(weight) != float(next(iter(sizes))):
            raise JobError(
                "engine.style=framework divides by the number of samples, but Loss.weight is "
                "something else; try engine.style=own"
            )
        ms.set_context(mode=ms.GRAPH_MODE)
        share = _Share(self._model, self._loss_of, window.samples)
        step = nn.TrainOneStepCell(GradAccumulation(share, shape[0]), self._optimizer)
        step.set_train()
        self._cell = AutoParallel(step)
        self._cell.hsdp()  # without it no weight ever changes, and nothing says so
        self._shape = shape
