"""`TorchEngine`: a job's model, data, optimizer and accumulator behind the loop's `Engine`."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

# Any optimizer imports torch's compiler at its first step: 1.2 s of CPU time and 70 MiB. Imported
# here, the process that workers are forked from does it once, and its forks share the memory.
import torch._dynamo
from torch.nn import Module

from orchestrator.config.optimizer import described
from orchestrator.engine.api import BoundaryReport, MicroBatch, Window
from orchestrator.engine.common.evaluation_figures import checked_figures
from orchestrator.engine.common.hyperparameters import Hyperparameters
from orchestrator.engine.settings import EngineSettings
from orchestrator.engine.torch import loader
from orchestrator.engine.torch.accumulator import Accumulator
from orchestrator.engine.torch.batch_norm.modes import with_norms
from orchestrator.engine.torch.bucket_order import agreed_order
from orchestrator.engine.torch.checks.at_start.model_warnings import advice
from orchestrator.engine.torch.checks.at_start.same_machine import (
    as_numbers,
    machine_digest,
    machine_warning,
)
from orchestrator.engine.torch.comm.base_group import BaseGroup
from orchestrator.engine.torch.comm.gathered import numbers_of_all
from orchestrator.engine.torch.grad_cache import CoupledWindows
from orchestrator.engine.torch.gradients.chunks import Leaves
from orchestrator.engine.torch.memory import memory_bytes, peak_memory_bytes
from orchestrator.engine.torch.model.device_and_dtype import be_deterministic, moved
from orchestrator.engine.torch.model.precision import Precision
from orchestrator.engine.torch.model_building import (
    built_model,
    built_optimizer,
    tried_loss,
)
from orchestrator.engine.torch.optimizers import hyperparameters_of
from orchestrator.engine.torch.seeds import derived_seed, seed_everything
from orchestrator.engine.torch.snapshot import Snapshot
from orchestrator.engine.torch.state import (
    load_model,
    load_optimizer,
    load_weights,
    weights_sha256,
)
from orchestrator.errors import ConfigError, JobError
from orchestrator.job import Job, is_coupled


def build_engine(job: Job, settings: EngineSettings, group: BaseGroup) -> TorchEngine:
    """Build the job's model, the same on every rank, and all that trains it. Collective.

    Raises:
        JobError: `model()` or `dataset()` give what they must not, or replicas differ.
        ConfigError: settings that cannot be used.
    """
    return TorchEngine(job, settings, group)


class TorchEngine:
    """An `Engine`; see there for the methods.

    Args:
        job: what to train.
        settings: checked already.
        group: the ranks; its device is where the model lives.
    """

    def __init__(self, job: Job, settings: EngineSettings, group: BaseGroup) -> None:
        self._job, self._settings, self._group = job, settings, group
        reproducible = settings.reduction == "reproducible"
        if reproducible:
            be_deterministic()
            if not settings.leaf_size:
                raise ConfigError(
                    "accumulation.reduction=reproducible needs accumulation.micro_batch"
                )
        self._leaves = Leaves(settings.leaf_size if reproducible else None)
        talks = bool(getattr(job, "talks_in_window", False))
        self._model, norms = with_norms(built_model(job, settings, group.device), settings.norm)
        order = None  # where nothing leaves during a backward
        if not (talks or group.size == 1 or reproducible or is_coupled(job)):
            forward = Precision(settings.precision, group.device).forward
            order = agreed_order(job, self._model, group, prepare=self._prepared, forward=forward)
        # Where a job talks too, its collectives and the buckets' could pair up wrongly; `warnings`
        # advises in the run's own words.
        how = {"overlap": not talks, "silent": not talks, "order": order, "advise": False}
        self._accumulator = Accumulator(
            self._model, built_optimizer(job, self._model, settings), group, settings.but(how)
        )
        self._clock = self._accumulator.clock
        self._hyperparameters = Hyperparameters(hyperparameters_of(self._accumulator.optimizer))
        self._gathered: dict[str, Any] | None = None  # the optimizer's state, until it is saved
        self._taken = threading.Event()  # what is to be saved was copied, so it may change
        self._taken.set()
        self._coupled = self._coupled_windows()
        self._window: Window | None = None
        self._in_window = False  # until its boundary is over
        self._done, self._trains = 0, self._model.training
        rows = self.gather(as_numbers(machine_digest()))
        self._warnings = norms + machine_warning(rows, settings.reduction)
        if not (talks or is_coupled(job)):
            self._warnings += tried_loss(
                job, self._model, group, self._accumulator.precision, self._prepared
            )

    def _coupled_windows(self) -> CoupledWindows | None:
        if not is_coupled(self._job):
            return None
        return CoupledWindows(
            self._job,
            self._model,
            self._settings,
            self._accumulator,
            prepare=self._prepared,
            leaves=self._leaves,
        )

    @property
    def model(self) -> Module:
        """The model that is trained."""
        return self._model

    @property
    def accumulator(self) -> Accumulator:
        """What accumulates its gradients."""
        return self._accumulator

    # ------------------------------------------------------------------ an update

    def batches(self, micro_batches: Iterable[MicroBatch]) -> Iterator[Any]:
        """One batch for each micro-batch, in order, fetched ahead when there are loader workers."""
        return loader.batches(
            micro_batches,
            dataset=self._job.dataset(),
            job=self._job,
            seed=self._settings.seed,
            workers=self._settings.loader_workers,
            pin_memory=self._group.device.type == "cuda",
        )

    def begin_window(self, window: Window) -> None:
        """Start an update: gradients are zero, the learning rate is set. Not collective."""
        self._window, self._done, self._gathered = window, 0, None
        self._in_window = True
        self._hyperparameters.check(f"before update {window.update}")
        if self._coupled is not None:
            self._coupled.begin()
        self._accumulator.begin_window(
            update=window.update,
            learning_rate=window.learning_rate,
            leaves=self._leaves.of_update(window.samples),
            expected_weight=window.samples,  # right wherever the weight is the number of samples
        )
        self._hyperparameters.keep()

    def micro_step(self, batch: Any, micro_batch: MicroBatch) -> None:
        """Forward and backward of one micro-batch."""
        window = self._window
        if window is None or micro_batch.update != window.update:
            raise RuntimeError(f"a micro-step of update {micro_batch.update} in no window of it")
        if self._coupled is not None:
            self._coupled.micro_step(batch, micro_batch)
            return
        self._done += 1
        with self._clock.compute():
            seed_everything(
                derived_seed("step", self._settings.seed, micro_batch.update, micro_batch.start)
            )
            batch = self._prepared(batch)
            with self._accumulator.precision.forward():
                loss = self._job.loss(self._model, batch)
        self._accumulator.backward(
            loss,
            last=self._done == len(window.micro_batches),
            leaf=self._leaves.leaf_of(micro_batch),
        )

    def _refuse_evaluation_mode(self) -> None:
        """Nothing would show it: without dropout, and with frozen statistics, losses look fine."""
        if self._trains and not self._model.training:
            raise JobError(
                "the model is in evaluation mode at an update's end, but did not begin in it: "
                f"{type(self._job).__name__}.loss() or after_update() has called model.eval() "
                "without a model.train() after it"
            )

    def boundary(self, *, stop: bool = False) -> BoundaryReport:
        """Reduce once, clip once, step once. Collective."""
        self._taken.wait()
        window, self._window = self._window, None
        if self._coupled is not None and window is not None:
            self._coupled.finish(window)
        self._hyperparameters.check("inside a window")
        self._refuse_evaluation_mode()
        report = self._accumulator.boundary(stop=stop)
        self._hyperparameters.keep()  # some optimizers count in them
        if report.applied:
            with torch.no_grad():
                getattr(self._job, "after_update", _nothing)(self._model, report.update)
            self._hyperparameters.check(
                f"in after_update of update {report.update}", jobs_turn=True
            )
        self._in_window = False
        return report

    # ------------------------------------------------------------------ around updates

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Every rank's `numbers` (equally many on all), a row for each rank. Collective."""
        return numbers_of_all(self._group, numbers)

    def evaluate(self) -> dict[str, float]:
        """The job's held-out figures, the model in evaluation mode meanwhile. Rank 0 only."""
        before = {layer: layer.training for layer in self._model.modules()}
        self._model.eval()
        try:
            with torch.no_grad():
                figures = getattr(self._job, "evaluate", lambda _: {})(self._model)
        finally:
            for layer, training in before.items():
                layer.training = training
        return checked_figures(figures, self._job)

    def check_replicas(self) -> None:
        """Compare the weights of all ranks. Collective."""
        self._accumulator.check_replicas()

    def optimizer_used(self) -> dict[str, Any]:
        """What steps the weights: its class, who chose it, and its groups of parameters."""
        return described(self._accumulator.optimizer, self._settings.optimizer)

    def parameter_count(self) -> int:
        """Trained numbers of the model, shared ones counted once, complex ones as two."""
        return self._accumulator.parameter_count()

    def gather_state(self) -> None:
        """Put a sharded optimizer's state together on rank 0, for `save_state`. Collective."""
        if self._accumulator.sharded:
            self._gathered = self._accumulator.optimizer_state()

    def holds_state(self) -> bool:
        """Whether `save_state` can be called: always, or after `gather_state` on rank 0."""
        return not self._accumulator.sharded or self._gathered is not None

    def save_state(self, folder: Path) -> dict[str, Any]:
        """Write weights and optimizer as safetensors; give the rest as JSON. Not collective."""
        return Snapshot(self._model, self._accumulator, self._gathered).save_state(folder)

    def snapshot(self) -> Snapshot:
        """What `save_state` would write now, for another thread. The next boundary waits for it."""
        snapshot = Snapshot(self._model, self._accumulator, self._gathered).keep()
        self._taken = snapshot.taken
        return snapshot

    def load_state(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """The inverse of `save_state`: the same bits afterwards. Not collective."""
        load_model(self._model, folder, extra["model"])
        load_optimizer(folder, extra["optimizer"], self._accumulator.load_optimizer_state)
        self._accumulator.precision.load(extra["precision"])
        self._hyperparameters.keep()

    def load_weights(self, path: Path) -> None:
        """Set the weights to a file's, the optimizer left alone. Raises `ConfigError`."""
        load_weights(self._model, path)

    def weights_sha256(self) -> str:
        """Digest over the bytes of the weights, tensor by tensor in the order of the names."""
        return weights_sha256(self._model)

    def collectives_beside(self) -> int:
        """Collectives in every window, besides the gradient's reduction."""
        return 0 if self._coupled is None else self._coupled.collectives

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of this rank's parameters, gradients and optimizer state."""
        return memory_bytes(self._model, self._accumulator)

    def peak_memory_bytes(self) -> int:
        """Largest memory of this rank so far: its GPU's if it computes there, or the process's."""
        return peak_memory_bytes(self._group.device)

    def warnings(self, micro_batches: int | None = None) -> list[str]:
        """What a user should know of this model and these ranks, each with its remedies."""
        found = advice(self._model, ranks=self._group.size, micro_batches=micro_batches)
        return [*self._warnings, *found]

    def _prepared(self, batch: Any) -> Any:
        return moved(batch, self._group.device, double=self._settings.precision == "float64")


def _nothing(model: Module, update: int) -> None:
    del model, update
