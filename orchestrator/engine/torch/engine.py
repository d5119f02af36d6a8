"""`TorchEngine`: a job's model, data, optimizer and accumulator behind the loop's `Engine`."""

from __future__ import annotations

import copy
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from orchestrator.engine.api import BoundaryReport, EngineSettings, MicroBatch, Window
from orchestrator.engine.torch import loader
from orchestrator.engine.torch.accumulator import Accumulator
from orchestrator.engine.torch.advice import advice
from orchestrator.engine.torch.agreement import (
    as_numbers,
    check_replicas,
    machine_digest,
    machine_warning,
)
from orchestrator.engine.torch.base_group import BaseGroup
from orchestrator.engine.torch.coupled import CoupledWindows
from orchestrator.engine.torch.norms import with_norms
from orchestrator.engine.torch.optimizers import build_optimizer, usable
from orchestrator.engine.torch.placement import be_deterministic, doubled, moved
from orchestrator.engine.torch.seeds import derived_seed, seed_everything
from orchestrator.engine.torch.state import (
    load_model,
    load_optimizer,
    save_model,
    save_optimizer,
    weights_sha256,
)
from orchestrator.engine.torch.trial import loss_warning
from orchestrator.errors import ConfigError, JobError
from orchestrator.job import Job, Loss, is_coupled


def build_engine(
    job: Job, settings: EngineSettings, group: BaseGroup, local_rank: int
) -> TorchEngine:
    """Build the job's model, the same on every rank, and all that trains it. Collective.

    Raises:
        JobError: `model()` or `dataset()` do not give what the contract says, or replicas differ.
        ConfigError: settings that cannot be used.
    """
    del local_rank  # the group has picked the device
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
        if settings.reduction == "reproducible":
            be_deterministic()
            if not settings.leaf_size:
                raise ConfigError(
                    "accumulation.reduction=reproducible needs accumulation.micro_batch"
                )
        self._model, norms = with_norms(self._built_model(), settings.norm)
        own = getattr(job, "optimizer", lambda _: None)(self._model)
        optimizer = (
            build_optimizer(self._model, settings.optimizer)
            if own is None
            else usable(own, f"{type(job).__name__}.optimizer")
        )
        self._accumulator = Accumulator(
            self._model,
            optimizer,
            group,
            clip_norm=settings.clip_norm,
            metric_names=settings.metric_names,
            bucket_bytes=settings.bucket_bytes,
            reduction=settings.reduction,
            sync=settings.sync,
            on_non_finite=settings.on_non_finite,
            precision=settings.precision,
            # Where a job talks too, its collectives and the buckets' could pair up wrongly.
            overlap=not self._talks,
            silent=not self._talks,
        )
        self._coupled = self._coupled_windows() if is_coupled(job) else None
        self._window: Window | None = None
        self._done = self._told = 0
        self._warnings = norms + advice(self._model) + self._agree() + self._try_loss()

    @property
    def model(self) -> Module:
        """The model that is trained."""
        return self._model

    @property
    def accumulator(self) -> Accumulator:
        """What accumulates its gradients."""
        return self._accumulator

    @property
    def _talks(self) -> bool:
        return bool(getattr(self._job, "talks_in_window", False))

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
        self._window, self._done = window, 0
        if self._coupled is not None:
            self._coupled.begin()
        leaf_size = self._leaf_size
        self._accumulator.begin_window(
            update=window.update,
            learning_rate=window.learning_rate,
            steps=window.steps,
            leaves=None if leaf_size is None else -(-window.samples // leaf_size),
            expected_weight=window.samples,  # right wherever the weight is the number of samples
        )

    def micro_step(self, batch: Any, micro_batch: MicroBatch) -> None:
        """Forward and backward of one micro-batch."""
        window = self._window
        if window is None or micro_batch.update != window.update:
            raise RuntimeError(f"a micro-step of update {micro_batch.update} in no window of it")
        if self._coupled is not None:
            self._coupled.embed(batch, micro_batch)
            return
        began = time.perf_counter()
        self._done += 1
        seed_everything(
            derived_seed("step", self._settings.seed, micro_batch.update, micro_batch.start)
        )
        batch = self._prepared(batch)
        with self._accumulator.precision.forward():
            loss = self._job.loss(self._model, batch)
        self._accumulator.compute_s += time.perf_counter() - began
        self._accumulator.backward(
            loss,
            last=self._done == len(window.micro_batches),
            leaf=self._leaf(micro_batch),
        )
        self._tell(loss, micro_batch)

    def boundary(self, *, stop: bool = False) -> BoundaryReport:
        """Reduce once, clip once, step once. Collective."""
        window, self._window = self._window, None
        if self._coupled is not None and window is not None:
            gather_s = self._coupled.finish(window)
            report = self._accumulator.boundary(stop=stop)
            report = replace(report, wait_s=report.wait_s + gather_s)
        else:
            report = self._accumulator.boundary(stop=stop)
        if report.applied:
            with torch.no_grad():
                getattr(self._job, "after_update", _nothing)(self._model, report.update)
        return report

    # ------------------------------------------------------------------ around updates

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Every rank's `numbers` (equally many on all), a row for each rank. Collective."""
        row = torch.tensor([list(numbers)], dtype=torch.float64, device=self._group.device)
        return self._group.all_gather(row).tolist()

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
        return {str(name): float(value) for name, value in figures.items()}

    def parameter_count(self) -> int:
        """Trained numbers of the model, shared ones counted once, complex ones as two."""
        return self._accumulator.parameter_count()

    def save_state(self, folder: Path) -> dict[str, Any]:
        """Write weights and optimizer as safetensors; give the rest as JSON. Not collective."""
        return {
            "model": save_model(self._model, folder),
            "optimizer": save_optimizer(self._accumulator.optimizer, folder),
            "precision": self._accumulator.precision.state(),
        }

    def load_state(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """The inverse of `save_state`: the same bits afterwards. Not collective."""
        load_model(self._model, folder, extra["model"])
        load_optimizer(self._accumulator.optimizer, folder, extra["optimizer"])
        self._accumulator.precision.load(extra["precision"])

    def weights_sha256(self) -> str:
        """Digest over the bytes of the weights, tensor by tensor in the order of the names."""
        return weights_sha256(self._model)

    def peak_memory_bytes(self) -> int:
        """Largest memory of this rank so far: its GPU's if it computes there, or the process's."""
        if self._group.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._group.device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere else

    def warnings(self) -> list[str]:
        """What a user should know of this model and these ranks, each with its remedies."""
        return list(self._warnings)

    # ------------------------------------------------------------------ parts

    @property
    def _leaf_size(self) -> int | None:
        return self._settings.leaf_size if self._settings.reduction == "reproducible" else None

    def _prepared(self, batch: Any) -> Any:
        return moved(batch, self._group.device, double=self._settings.precision == "float64")

    def _tell(self, loss: Loss, micro_batch: MicroBatch) -> None:
        """Put the loss in the rank's log, as often as the settings say."""
        self._told += 1
        every = self._settings.log_every
        if every and self._told % every == 0:
            mean = float(loss.total.detach()) / float(loss.weight) if loss.weight else float("nan")
            sentence = f"update {micro_batch.update} micro-step {self._told}: loss {mean:.6f}"
            print(sentence, flush=True)  # noqa: T201  # goes to the rank's log

    def _coupled_windows(self) -> CoupledWindows:
        job: Any = self._job
        return CoupledWindows(
            job,
            self._model,
            self._accumulator,
            self._group,
            metric_names=self._settings.metric_names,
            seed=self._settings.seed,
            prepare=self._prepared,
            leaf_of=self._leaf,
            any_batch=lambda: loader.collate_of(job)([job.dataset()[0]]),
        )

    def _leaf(self, micro_batch: MicroBatch) -> int | None:
        if self._leaf_size is None:
            return None
        leaf, beside = divmod(micro_batch.start, self._leaf_size)
        if beside:
            raise RuntimeError(f"{micro_batch.start} does not begin a leaf of {self._leaf_size}")
        return leaf

    def _built_model(self) -> Module:
        seed_everything(derived_seed("model", self._settings.seed))
        model = self._job.model()
        if not isinstance(model, Module):
            raise JobError(f"model() must give a torch.nn.Module, but gives {type(model).__name__}")
        if self._settings.precision == "float64":
            model = doubled(model)
        return model.to(self._group.device)

    def _try_loss(self) -> list[str]:
        """Warn of a loss that is not a sum; on rank 0, whose warnings are shown. Not collective."""
        if self._group.rank != 0 or self._coupled is not None or self._talks:
            return []
        # A shallow copy, so that what a job counts in its own attributes is not counted here.
        job, dataset = copy.copy(self._job), self._job.dataset()
        loader.check_dataset(dataset)
        self._group.silence.keep("while rank 0 tried the loss")
        try:
            return loss_warning(
                job,
                self._model,
                dataset,
                prepare=self._prepared,
                forward=self._accumulator.precision.forward,
            )
        finally:
            self._group.silence.end()

    def _agree(self) -> list[str]:
        """Check that all ranks start alike, with one exchange. Collective."""
        weights = as_numbers(self.weights_sha256())
        rows = self.gather(weights + as_numbers(machine_digest(self._group.device)))
        check_replicas([row[: len(weights)] for row in rows])
        return machine_warning([row[len(weights) :] for row in rows], self._settings.reduction)


def _nothing(model: Module, update: int) -> None:
    del model, update
