"""`TorchEngine`: a job's model, data and optimizer behind the `Engine` interface."""

from __future__ import annotations

import resource
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from orchestrator.config.optimizer import chosen, described
from orchestrator.engine.api import BoundaryReport, EngineSettings, MicroBatch, Window
from orchestrator.engine.common.job_checks import Hyperparameters, checked_figures, refuse_scheduler
from orchestrator.engine.torch import loader
from orchestrator.engine.torch.accumulator import Accumulator
from orchestrator.engine.torch.grad_cache import CoupledWindows
from orchestrator.engine.torch.group import BaseGroup, gather_numbers
from orchestrator.engine.torch.model import (
    Precision,
    advice,
    be_deterministic,
    derived_seed,
    doubled,
    moved,
    seed_everything,
    with_norms,
)
from orchestrator.engine.torch.optimizers import (
    build_optimizer,
    check_optimizer,
    hyperparameters_of,
)
from orchestrator.engine.torch.reproducible import Leaves
from orchestrator.engine.torch.start_checks import (
    digest_to_floats,
    machine_digest,
    machine_warning,
)
from orchestrator.engine.torch.state import (
    OPTIMIZER,
    WEIGHTS,
    load_model,
    load_optimizer,
    load_weights,
    model_state,
    pack,
    prepared,
    weights_sha256,
    write_prepared,
)
from orchestrator.engine.torch.trial import Trial
from orchestrator.errors import ConfigError, JobError
from orchestrator.job import Job, is_coupled


def build_model(job: Job, settings: EngineSettings, device: torch.device) -> Module:
    """Return the job's model on `device`, from the run's seed. Raises `JobError` when it is
    none.
    """
    seed_everything(derived_seed("model", settings.seed))
    model = job.model()
    if not isinstance(model, Module):
        raise JobError(f"model() must give a torch.nn.Module, but gives {type(model).__name__}")
    if settings.precision == "float64":
        model = doubled(model)
    return model.to(device)


def build_job_optimizer(job: Job, model: Module, settings: EngineSettings) -> Optimizer:
    """Return the job's own, or the one that the configuration names.

    Raises:
        ConfigError: it cannot be built, or used.
        JobError: a scheduler hangs on it.
    """
    given = getattr(job, "optimizer", lambda _: None)(model)
    own = chosen(given, settings.optimizer, type(job).__name__)
    if own is None:
        return build_optimizer(model, settings.optimizer)
    found = check_optimizer(own, f"{type(job).__name__}.optimizer")
    refuse_scheduler(found.param_groups, job)
    return found


# ------------------------------------------------------------------ Memory


def peak_memory_bytes(device: torch.device) -> int:
    """Return the largest memory so far: the GPU's if it computes there, or the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere else


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum({(t.device, t.data_ptr(), t.numel()): t.nbytes for t in tensors}.values())


# ------------------------------------------------------------------ Snapshots
# Weights and optimizer state change only in the optimizer's step, at a boundary. So the writer
# copies the large tensors while the next window computes (`take`), and the next boundary waits for
# it; usually it is done by then. State that a window itself may change (buffers, small tensors
# such as a rate) is copied at once. The bytes written are the same either way.


SMALL = 4096
"""Numbers of a tensor that is copied at once."""


class Snapshot:
    """A checkpoint's tensors and the rest of it. Until `keep` they are the live ones.

    Args:
        gathered: the state of an optimizer in shards, put together for this; None: it has none.

    Attributes:
        taken: set once all tensors are copied, so training may change them.

    Raises:
        RuntimeError: it is in shards, and was not gathered.
    """

    def __init__(
        self, model: Module, accumulator: Accumulator, gathered: Mapping[str, Any] | None
    ) -> None:
        if gathered is None and accumulator.sharded:
            raise RuntimeError("a sharded state is saved on rank 0, after gather_state()")
        optimizer = accumulator.optimizer_state() if gathered is None else gathered
        assert optimizer is not None  # noqa: S101  # it is in no shards
        precision = accumulator.precision.state()
        weights, rest = model_state(model)
        states: dict[str, Tensor] = {}
        packed = pack(optimizer, states, "")
        self._extra = {"model": rest, "optimizer": packed, "precision": precision}
        self._files = {WEIGHTS: prepared(weights), OPTIMIZER: prepared(states)}
        self._lasting = {parameter.data_ptr() for parameter in model.parameters()}
        self._own = gathered is not None
        self._later: list[tuple[dict[str, Tensor], str]] = []
        self.taken = threading.Event()

    def keep(self) -> Snapshot:
        """Copy what a window may change; the next boundary has to wait for `taken`."""
        for name, (tensors, _) in self._files.items():
            for key, tensor in tensors.items():
                steady = name == OPTIMIZER or tensor.data_ptr() in self._lasting
                if steady and tensor.numel() > SMALL:
                    if not (self._own and name == OPTIMIZER):
                        self._later.append((tensors, key))
                else:
                    tensors[key] = _copy(tensor)
        return self

    def take(self) -> None:
        """Copy the rest, in any thread. Sets `taken` even if it fails."""
        try:
            for tensors, key in self._later:
                tensors[key] = _copy(tensors[key])
        finally:
            self.taken.set()

    def save_state(self, folder: Path) -> dict[str, Any]:
        """Write weights and optimizer as safetensors; give the rest as JSON."""
        for name, (tensors, metadata) in self._files.items():
            write_prepared(folder / name, tensors, metadata)
        self._files.clear()  # copies are large
        return self._extra


def _copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy in the host's memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


# ------------------------------------------------------------------ Engine


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

    Attributes:
        model: the model that is trained.
        accumulator: of its gradients.
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
        self.model, norms = with_norms(build_model(job, settings, group.device), settings.norm)
        forward = Precision(settings.precision, group.device).forward
        trial = Trial(job, self.model, group, prepare=self._prepared, forward=forward)
        order = None  # where nothing leaves during a backward
        if not (talks or group.size == 1 or reproducible or is_coupled(job)):
            order = trial.bucket_order()
        # Where a job talks too, its collectives and the buckets' could pair up wrongly; `warnings`
        # advises in the run's own words.
        how = {"overlap": not talks, "silent": not talks, "order": order, "advise": False}
        self.accumulator = Accumulator(
            self.model,
            build_job_optimizer(job, self.model, settings),
            group,
            settings.with_options(how),
        )
        self._clock = self.accumulator.clock
        self._hyperparameters = Hyperparameters(hyperparameters_of(self.accumulator.optimizer))
        self._gathered: dict[str, Any] | None = None  # the optimizer's state, until it is saved
        self._taken = threading.Event()  # what is to be saved was copied, so it may change
        self._taken.set()
        self._coupled = self._coupled_windows()
        self._window: Window | None = None
        self._in_window = False  # until its boundary is over
        self._done, self._trains = 0, self.model.training
        rows = self.gather(digest_to_floats(machine_digest()))
        self._warnings = norms + machine_warning(rows, settings.reduction)
        if not (talks or is_coupled(job)):
            self._warnings += trial.warnings()

    def _coupled_windows(self) -> CoupledWindows | None:
        if not is_coupled(self._job):
            return None
        return CoupledWindows(
            self._job,
            self.model,
            self._settings,
            self.accumulator,
            prepare=self._prepared,
            leaves=self._leaves,
        )

    # ------------------------------------------------------------------ an update

    def batches(self, micro_batches: Iterable[MicroBatch]) -> Iterator[Any]:
        """Return one batch for each micro-batch, in order, fetched ahead when there are loader
        workers.
        """
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
        self.accumulator.begin_window(
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
        with self._clock.compute:
            seed_everything(
                derived_seed("step", self._settings.seed, micro_batch.update, micro_batch.start)
            )
            batch = self._prepared(batch)
            with self.accumulator.precision.forward():
                loss = self._job.loss(self.model, batch)
        self.accumulator.backward(
            loss,
            last=self._done == len(window.micro_batches),
            leaf=self._leaves.leaf_of(micro_batch),
        )

    def _refuse_evaluation_mode(self) -> None:
        """Nothing would show it: without dropout, and with frozen statistics, losses look fine."""
        if self._trains and not self.model.training:
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
        report = self.accumulator.boundary(stop=stop)
        self._hyperparameters.keep()  # some optimizers count in them
        if report.applied:
            with torch.no_grad():
                if after_update := getattr(self._job, "after_update", None):
                    after_update(self.model, report.update)
            self._hyperparameters.check(
                f"in after_update of update {report.update}", jobs_turn=True
            )
        self._in_window = False
        return report

    # ------------------------------------------------------------------ around updates

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return every rank's `numbers` (equally many on all), a row for each rank. Collective."""
        return gather_numbers(self._group, numbers)

    def evaluate(self) -> dict[str, float]:
        """Compute the job's held-out figures, with the model in evaluation mode. Rank 0
        only.
        """
        before = {layer: layer.training for layer in self.model.modules()}
        self.model.eval()
        try:
            with torch.no_grad():
                figures = getattr(self._job, "evaluate", lambda _: {})(self.model)
        finally:
            for layer, training in before.items():
                layer.training = training
        return checked_figures(figures, self._job)

    def check_replicas(self) -> None:
        """Compare the weights of all ranks. Collective."""
        self.accumulator.check_replicas()

    def optimizer_used(self) -> dict[str, Any]:
        """Describe the optimizer: its class, where it is from, and its groups of parameters."""
        return described(self.accumulator.optimizer, self._settings.optimizer)

    def parameter_count(self) -> int:
        """Count the trained numbers of the model: shared ones once, complex ones twice."""
        return self.accumulator.parameter_count()

    def gather_state(self) -> None:
        """Put a sharded optimizer's state together on rank 0, for `save_state`. Collective."""
        if self.accumulator.sharded:
            self._gathered = self.accumulator.optimizer_state()

    def holds_state(self) -> bool:
        """Return whether `save_state` can be called: always, or after `gather_state` on rank 0."""
        return not self.accumulator.sharded or self._gathered is not None

    def save_state(self, folder: Path) -> dict[str, Any]:
        """Write weights and optimizer as safetensors; give the rest as JSON. Not collective."""
        return Snapshot(self.model, self.accumulator, self._gathered).save_state(folder)

    def snapshot(self) -> Snapshot:
        """Return what `save_state` would write now, for another thread. The next boundary waits."""
        snapshot = Snapshot(self.model, self.accumulator, self._gathered).keep()
        self._taken = snapshot.taken
        return snapshot

    def load_state(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """Load what `save_state` wrote: the same bits afterwards. Not collective."""
        load_model(self.model, folder, extra["model"])
        load_optimizer(folder, extra["optimizer"], self.accumulator.load_optimizer_state)
        self.accumulator.precision.load(extra["precision"])
        self._hyperparameters.keep()

    def load_weights(self, path: Path) -> None:
        """Set the weights to a file's, the optimizer left alone. Raises `ConfigError`."""
        load_weights(self.model, path)

    def weights_sha256(self) -> str:
        """Return the digest over the bytes of the weights, tensor by tensor in the order of the
        names.
        """
        return weights_sha256(self.model)

    def extra_collectives(self) -> int:
        """Return collectives in every window, besides the gradient's reduction."""
        return 0 if self._coupled is None else self._coupled.collectives

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes of this rank's parameters, gradients and optimizer state. Tensors that
        share memory count once.
        """
        state = self.accumulator.optimizer.state.values()
        tensors = (v for held in state for v in held.values() if isinstance(v, Tensor))
        return {
            "parameters": _bytes((*self.model.parameters(), *self.model.buffers())),
            "gradients": self.accumulator.gradient_bytes(),
            "optimizer": _bytes(tensors),
        }

    def peak_memory_bytes(self) -> int:
        """Return the largest memory of this rank so far: its GPU's if it computes there, or the
        process's.
        """
        return peak_memory_bytes(self._group.device)

    def warnings(self, micro_batches: int | None = None) -> list[str]:
        """Return warnings about this model and these ranks, each with its remedies."""
        found = advice(self.model, ranks=self._group.size, micro_batches=micro_batches)
        return [*self._warnings, *found]

    def _prepared(self, batch: Any) -> Any:
        return moved(batch, self._group.device, double=self._settings.precision == "float64")
