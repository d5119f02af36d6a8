"""`MindSporeEngine`: a job's model, data and optimizer behind the `Engine` interface."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from safetensors.numpy import load_file, save_file

from orchestrator.config.optimizer import check_builder, described
from orchestrator.data import HeldOutData, kept_generators
from orchestrator.engine.api import (
    BoundaryReport,
    Engine,
    EngineSettings,
    HeldOutReport,
    MicroBatch,
    Window,
)
from orchestrator.engine.common.clock import Clock
from orchestrator.engine.common.held_out import HeldOutSums
from orchestrator.engine.common.job_checks import (
    Kinds,
    check_fits,
    checked_figures,
    describe_mismatches,
    left_in_evaluation,
    refuse_scheduler,
    uncompiled,
)
from orchestrator.engine.common.job_state import MOST_ENTRIES, JobState
from orchestrator.engine.common.modes import ModelModes
from orchestrator.engine.common.packing import pack, unpack
from orchestrator.engine.common.replicas import folded
from orchestrator.engine.common.seeds import derived_seed, seed_python_and_numpy
from orchestrator.engine.common.trailer import STOP, Trailer, limb_bits
from orchestrator.engine.common.update_policy import UpdatePolicy
from orchestrator.engine.mindspore.accumulator import (
    Accumulator,
    Sums,
    batch_maker,
    compiled_loss,
    flatten,
    python_loss,
)
from orchestrator.engine.mindspore.group import MindSporeGroup
from orchestrator.engine.mindspore.model import (
    advice,
    build_model,
    build_optimizer,
    check_same_weights,
    kept_statistics,
    learning_rate_of,
    replica_checker,
    seed_everything,
    state_of,
    statistics_of_writer,
)
from orchestrator.errors import ConfigError, JobError, NonFiniteError, RunFolderError
from orchestrator.job import Job, dataset_of
from orchestrator.plan.held_out import HeldOutPiece, HeldOutShare
from orchestrator.plan.wire import trailer_numbers
from orchestrator.rundir.checkpoints import WEIGHTS

# ------------------------------------------------------------------ Batches
# One for each micro-batch, in order, fetched ahead by threads. Samples are numpy arrays or numbers
# (or tuples, or dictionaries of them); they are stacked and become MindSpore tensors. The data set
# may be MindSpore's own pipeline, read into something indexable.


def stack(samples: Sequence[Any], floats: Any = None) -> Any:
    """Stack samples along a new axis 0, the structure kept.

    Args:
        samples: equally built: numbers, arrays, tensors, or tuples or dictionaries of them.
        floats: numpy type of floating-point numbers; None leaves float64 to become float32.
    """
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: stack([sample[key] for sample in samples], floats) for key in first}
    if isinstance(first, tuple | list):
        return tuple(stack(column, floats) for column in zip(*samples, strict=True))
    if isinstance(first, Tensor):
        return ops.stack(list(samples))
    array = np.stack([np.asarray(sample) for sample in samples])
    if array.dtype.kind == "f":
        wanted = floats or (np.float32 if array.dtype == np.float64 else array.dtype)
        array = array.astype(wanted, copy=False)
    return Tensor(array)


class Loader:
    """Fetcher and collator of micro-batches.

    Args:
        floats: see `stack`.
        workers: threads that fetch ahead; 0 fetches when asked.
    """

    def __init__(self, job: Job, seed: int, workers: int, floats: Any) -> None:
        self._dataset = dataset_of(job)
        self._collate: Callable[[list[Any]], Any] = getattr(job, "collate", lambda _: None)
        self._augments = bool(getattr(job, "augments", False))
        self._seed, self._workers, self._floats = seed, workers, floats
        if workers and self._augments:
            raise JobError(
                f"{type(job).__name__} augments, and MindSpore's loader workers are threads, which "
                f"share one random state; set train.loader_workers=0"
            )

    def _fetch(self, dataset: Any, micro_batch: MicroBatch) -> Any:
        samples: list[Any] = []
        for position, index in zip(micro_batch.positions, micro_batch.indices, strict=True):
            # Without `augments` once a micro-batch. Threads share the generators, so not in them.
            if self._augments or (position == micro_batch.start and not self._workers):
                seed = derived_seed("data", self._seed, micro_batch.update, position)
                seed_python_and_numpy(seed)
                ms.dataset.config.set_seed(seed & 0x7FFFFFFF)  # of mindspore.dataset.vision
            samples.append(dataset[index])
        collated = self._collate(samples)
        return stack(samples, self._floats) if collated is None else collated

    def batches(
        self, micro_batches: Iterable[MicroBatch], data: HeldOutData | None = None
    ) -> Iterator[Any]:
        """Yield a batch for each micro-batch: of the training's data, or of held-out data."""
        dataset = self._dataset if data is None else data
        if not self._workers:
            yield from (self._fetch(dataset, micro_batch) for micro_batch in micro_batches)
            return
        with ThreadPoolExecutor(self._workers, thread_name_prefix="loader") as pool:
            waiting: deque[Future[Any]] = deque()
            for micro_batch in micro_batches:
                waiting.append(pool.submit(self._fetch, dataset, micro_batch))
                if len(waiting) > 2 * self._workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()


# ------------------------------------------------------------------ State on disk
# Weights and optimizer as safetensors, which every framework reads.


OPTIMIZER = "optimizer.safetensors"
JOB = "job.safetensors"
"""Tensors of the state that a job saves of itself, where there are any."""


def arrays_of(parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    """Return copies of the parameters as contiguous arrays, in the order of the names."""
    return {name: np.array(parameters[name].asnumpy(), order="C") for name in sorted(parameters)}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of the state of one moment, to be written from any thread."""

    files: Mapping[str, dict[str, Any]]
    extra: dict[str, Any]

    def take(self) -> None:
        """Do nothing: all is copied already."""

    def save_state(self, folder: Path) -> dict[str, Any]:
        """Write the safetensors files; give the rest as what JSON can hold."""
        for name, arrays in self.files.items():
            save_file(arrays, str(folder / name))
        return self.extra


def load(path: Path, parameters: Mapping[str, Parameter]) -> None:
    """Set the parameters to a file's, bit for bit. Raises `RunFolderError` for another model's."""
    tensors = load_file(str(path))
    if wrong := describe_mismatches(_kinds_in(tensors), _kinds_of(parameters)):
        raise RunFolderError(f"{path} does not fit this model: {wrong}")
    _assign(parameters, tensors)


def saved_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, by name."""
    return {name: Tensor(array) for name, array in load_file(str(path)).items()}


def load_cast(path: Path, parameters: Mapping[str, Parameter]) -> None:
    """Set the parameters to a file's, in the precision that they have.

    Raises `RunFolderError` for another model's.
    """
    arrays = load_file(str(path))
    kinds = {
        name: (_kinds_of(parameters).get(name, kind)[0], kind[1])
        for name, kind in _kinds_in(arrays).items()
    }
    if wrong := describe_mismatches(kinds, _kinds_of(parameters)):
        raise RunFolderError(f"{path} does not fit this model: {wrong}")
    _assign(parameters, arrays)


def _assign(parameters: Mapping[str, Parameter], arrays: Mapping[str, Any]) -> None:
    for name, array in arrays.items():
        ops.assign(parameters[name], Tensor(array, parameters[name].dtype))  # see `_assign_rate`


def _kinds_in(arrays: Mapping[str, Any]) -> Kinds:
    return {name: (array.dtype.name, tuple(array.shape)) for name, array in arrays.items()}


def _kinds_of(parameters: Mapping[str, Parameter]) -> Kinds:
    return {name: (str(p.dtype).lower(), tuple(p.shape)) for name, p in parameters.items()}


def as_float(value: Any) -> float:
    """Return a number or a tensor of one number as a float; waits for it."""
    return float(value.asnumpy()) if isinstance(value, Tensor) else float(value)


# ------------------------------------------------------------------ Engine


class MindSporeEngine(Engine):
    """An `Engine`; see there for the methods."""

    def __init__(self, job: Job, settings: EngineSettings, group: MindSporeGroup) -> None:
        self._job, self._settings, self._group = job, settings, group
        ms.set_context(mode=ms.GRAPH_MODE if settings.mode == "graph" else ms.PYNATIVE_MODE)
        self._model, self._model_warnings = build_model(job, settings)
        own = getattr(job, "optimizer", lambda _: None)(self._model)
        check_builder(settings.optimizer, type(job).__name__, own=own is not None)
        if own is not None and not (callable(own) and hasattr(own, "parameters")):
            raise ConfigError(
                f"{type(job).__name__}.optimizer gives a {type(own).__name__}, not an optimizer of "
                "mindspore.nn or mindspore.experimental.optim"
            )
        refuse_scheduler(getattr(own, "param_groups", ()), job)
        trainable = self._model.trainable_params()
        if not trainable:
            raise JobError("model() has no trainable parameters")
        self._optimizer = self._built_optimizer(own, trainable)
        self._rate = learning_rate_of(self._optimizer)
        self._names = tuple(settings.metric_names)
        compiled = settings.mode != "pynative"
        self._talks = bool(getattr(job, "talks_in_window", False))
        self._accumulator = Accumulator(
            self._model,
            compiled_loss(job) if compiled else python_loss(job),
            group,
            settings,
            reference=python_loss(job),
            trailer_numbers=trailer_numbers(len(self._names)),
            refuse_means=not self._talks,
        )
        mantissa_bits = 53 if self._accumulator.dtype == ms.float64 else 24
        self._limb_bits = limb_bits(mantissa_bits, group.size)
        self._replica_checker = replica_checker(self._model, self.gather, group.size)
        self._policy = UpdatePolicy(settings, self._accumulator.precision, self.gather)
        self._step = self._accumulator.step_with(self._optimizer)
        floats = np.float64 if settings.precision == "float64" else None
        self._loader = Loader(job, settings.seed, settings.loader_workers, floats)
        self._losses: list[Tensor] = []  # [weight, total, *metrics] of each micro-step
        self._window: Window  # the latest
        self._compile_mark = 0.0
        self._clock, self._mark = Clock(), group.mark()
        # Parameters must not cease to train (`check_trained`); cells may change their mode.
        cells = {"training": self._model.cells_and_names()}
        self._modes = ModelModes(cells, lambda cell, mode, value: cell.add_flags(**{mode: value}))
        in_checkpoints = {id(part) for part in (self._optimizer, *self._model.get_parameters())}
        in_checkpoints |= {id(cell) for _, cell in self._model.cells_and_names()}
        self._job_state = JobState(
            job, nn.Cell, lambda value: 0 if id(value) in in_checkpoints else _version_of(value)
        )
        check_same_weights(self.weights_sha256(), self.gather)

    # ------------------------------------------------------------------ an update

    def batches(self, micro_batches: Iterable[MicroBatch]) -> Iterator[Any]:
        return self._loader.batches(micro_batches)

    def held_out_batches(
        self, data: HeldOutData, micro_batches: Iterable[MicroBatch]
    ) -> Iterator[Any]:
        return self._loader.batches(micro_batches, data)

    def begin_window(self, window: Window) -> None:
        self._job_state.watch()
        self._window = window
        self._clock.begin()
        self._compile_mark, self._mark = self._compile_total(), self._group.mark()
        self._losses.clear()
        self._accumulator.clear()
        self._accumulator.precision.begin_window()
        self._set_rate(window)
        if not self._talks:
            self._group.silence = f"in mid-window of update {window.update}"

    def micro_step(self, batch: Any, micro_batch: MicroBatch) -> None:
        with self._clock.compute:
            seed = derived_seed("step", self._settings.seed, micro_batch.update, micro_batch.start)
            seed_everything(seed)
            self._losses.append(self._accumulator.add(batch))

    def boundary(self, *, stop: bool = False) -> BoundaryReport:
        update = self._window.update
        self._check_window()
        with self._clock.compute:
            # This waits for the losses, so the rest is not computing.
            losses = [number for row in self._losses for number in row.asnumpy().tolist()]
            trailer = Trailer.from_losses(losses, len(self._names))
            trailer.flags[STOP] = int(stop)
            self._replica_checker.write_digest(trailer, update)
        self._group.silence = None
        with self._clock.wait:
            gradients, numbers = self._accumulator.reduce(trailer.numbers(self._limb_bits))
        scale = self._accumulator.precision.scale
        with self._clock.optimize:
            totals = Trailer.from_numbers(numbers, self._limb_bits)
            self._replica_checker.check(totals, update)
            norm_of_sum, norm = self._accumulator.norm_of(gradients), None
            named = partial(self._accumulator.not_finite, gradients)
            decision = self._policy.norm_and_factor(update, totals, trailer, norm_of_sum, named)
            if decision is not None:
                norm, factor = decision
                self._step(Tensor(factor, self._accumulator.dtype), *gradients)
                self._accumulator.precision.succeeded()
        self._rate.keep()
        if norm is not None:
            self._after_update(update)
        compile_s = self._compile_total() - self._compile_mark
        if compile_s:
            print(
                f"update {update}: compiled in {compile_s:.2f} s, which later updates do not take",
                flush=True,
            )
        sent, seconds = self._group.since(self._mark), self._clock.seconds()
        return BoundaryReport(
            update=update,
            applied=norm is not None,
            gradient_norm=norm,
            loss_scale=scale,
            micro_steps=len(self._losses),
            collectives=sent.collectives,
            bytes_on_wire=sent.bytes_on_wire,
            compute_s=max(0.0, seconds["compute_s"] - compile_s),
            wait_s=seconds["wait_s"],
            optimizer_s=seconds["optimizer_s"],
            compile_s=compile_s,
            # Right after a reduction, so that no rank is compiling meanwhile.
            plain_step_s=self._accumulator.plain_step_s(),
            **totals.report(self._names),
        )

    def _set_rate(self, window: Window) -> None:
        self._accumulator.check_trained()
        self._rate.check(f"before update {window.update}")
        self._rate.set(window.learning_rate)

    def _check_window(self) -> None:
        self._rate.check("inside a window")
        if not self._model.training:
            raise left_in_evaluation(self._job, "model.set_train(False)", "model.set_train()")

    def _after_update(self, update: int) -> None:
        if after_update := getattr(self._job, "after_update", None):
            # What it draws is equal on all ranks and after a restart.
            seed_everything(derived_seed("after", self._settings.seed, update))
            after_update(self._model, update)
        self._rate.check(f"in after_update of update {update}")

    # ------------------------------------------------------------------ around updates

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        row = Tensor(np.asarray([list(numbers)], np.float64))
        return self._group.all_gather(row).asnumpy().tolist()

    def evaluate(self) -> dict[str, float]:
        seed_before = ms.get_seed()
        with self._in_evaluation(), kept_generators():
            # The same numbers in each, as in `evaluate_held_out`.
            seed_everything(derived_seed("evaluation", self._settings.seed))
            figures = getattr(self._job, "evaluate", lambda _: {})(self._model)
            ms.set_seed(seed_before)
        return checked_figures(figures, self._job)

    def evaluate_held_out(
        self,
        data: HeldOutData,
        share: HeldOutShare,
        batches: Iterator[Any],
        before_piece: Callable[[int], None],
    ) -> HeldOutReport:
        group, mark, seed_before = self._group, self._group.mark(), ms.get_seed()
        sums = HeldOutSums(data, self._names, lambda numbers: list(map(as_float, numbers)))
        loss = python_loss(self._job)

        def row_of(piece: HeldOutPiece, batch: Any) -> Sequence[Any]:
            # The same random numbers in each evaluation, on any rank.
            seed_everything(derived_seed("held-out", self._settings.seed, piece.start))
            return self._accumulator.losses(loss, batch)

        with (
            statistics_of_writer(self._model, group, self.gather),
            self._in_evaluation(),
            kept_generators(),
            self._job_state.isolated(),
        ):
            group.silence = "in an evaluation"
            try:
                sums.add_share(share, batches, before_piece, row_of)
            finally:
                group.silence = None
                ms.set_seed(seed_before)
            numbers = sums.numbers(self._limb_bits)
        [summed] = group.sums([Tensor(np.asarray(numbers), self._accumulator.dtype)])
        figures = sums.figures(summed.asnumpy().tolist(), self._limb_bits, self.gather)
        sent = group.since(mark)
        return HeldOutReport(
            figures=figures, collectives=sent.collectives, bytes_on_wire=sent.bytes_on_wire
        )

    @contextmanager
    def _in_evaluation(self) -> Generator[None]:
        """Put the model into evaluation mode; each of its cells is as before afterwards."""
        before = [(cell, cell.training) for _, cell in self._model.cells_and_names()]
        self._model.set_train(False)
        try:
            yield
        finally:
            for cell, training in before:
                cell.add_flags(training=training)

    def check_replicas(self) -> None:
        self._replica_checker.check_all()
        if not self._job_state.saved:
            return
        tensors: dict[str, Tensor] = {}
        packed = pack(self._job_state.state(), tensors, "", Tensor)
        values = [json.dumps(packed), *(tensors[name].asnumpy().tobytes() for name in tensors)]
        self._job_state.check_same(self.gather([float(folded(values))]))

    def optimizer_used(self) -> dict[str, Any]:
        """Describe the optimizer: its class, where it is from, and its groups of parameters."""
        return described(self._optimizer, self._settings.optimizer)

    def parameter_count(self) -> int:
        return sum(int(p.size) for p in self._accumulator.parameters)

    def save_state(self, folder: Path) -> dict[str, Any]:
        return self.snapshot().save_state(folder)

    def snapshot(self) -> Snapshot:
        """Return what `save_state` would write now, for another thread."""
        weights = self._model.parameters_dict()
        parameters = {WEIGHTS: weights, OPTIMIZER: state_of(self._optimizer, weights)}
        files = {name: arrays_of(part) for name, part in parameters.items()}
        tensors: dict[str, Tensor] = {}
        extra = {
            "engine": "mindspore",
            "precision": self._accumulator.precision.state(),
            "modes": self._modes.changes(),
            "job": pack(self._job_state.state(), tensors, "job", Tensor),
        }
        if tensors:
            files[JOB] = {n: np.array(t.asnumpy(), order="C") for n, t in tensors.items()}
        return Snapshot(files, extra)

    def load_state(self, folder: Path, extra: Mapping[str, Any]) -> None:
        if extra.get("engine") != "mindspore":
            raise JobError(
                f"{folder} is a checkpoint of another engine; its weights alone fit here"
            )
        weights = self._model.parameters_dict()
        load(folder / WEIGHTS, weights)
        load(folder / OPTIMIZER, state_of(self._optimizer, weights))
        self._accumulator.precision.load(extra["precision"])
        self._modes.apply(extra["modes"])
        arrays = load_file(str(folder / JOB)) if (folder / JOB).exists() else {}
        tensors = {name: Tensor(array) for name, array in arrays.items()}
        self._job_state.load(unpack(extra["job"], tensors))
        self._rate.keep()

    def load_weights(self, path: Path) -> None:
        arrays = {uncompiled(name): array for name, array in load_file(str(path)).items()}
        parameters = self._model.parameters_dict()
        check_fits(_kinds_in(arrays), _kinds_of(parameters))
        _assign(parameters, arrays)

    def weights_sha256(self) -> str:
        whole = hashlib.sha256()
        for array in arrays_of(self._model.parameters_dict()).values():
            whole.update(array.tobytes())
        return whole.hexdigest()

    def memory_bytes(self) -> dict[str, int]:
        weights = self._model.parameters_dict()
        return {
            "parameters": _bytes(weights.values()),
            "gradients": _bytes(self._model.trainable_params()),
            "optimizer": _bytes(state_of(self._optimizer, weights).values()),
        }

    def peak_memory_bytes(self) -> int:
        if self._group.transport != "mccl":
            return int(ms.runtime.max_memory_allocated())
        return super().peak_memory_bytes()

    def warnings(self, micro_batches: int | None = None) -> list[str]:
        sentences = advice(self._model, ranks=self._group.size, micro_batches=micro_batches)
        return [*self._model_warnings, *sentences]

    # ------------------------------------------------------------------ parts

    def _built_optimizer(self, own: Any, trainable: Sequence[Any]) -> Any:
        return build_optimizer(self._settings.optimizer, trainable) if own is None else own

    def _compile_total(self) -> float:
        return self._accumulator.compile_s + self._step.compile_s


def _version_of(value: Any) -> Any:
    """Return a tensor's numbers if they are few; else which tensor it is, since MindSpore counts no
    writes in place.
    """
    if not isinstance(value, Tensor):
        return None
    return value.asnumpy().tobytes() if value.size <= MOST_ENTRIES else id(value)


def _bytes(parameters: Iterable[Any]) -> int:
    return sum(parameter.size * parameter.itemsize for parameter in parameters)


# ------------------------------------------------------------------ engine.style=framework
# MindSpore's own `GradAccumulation` inside `AutoParallel` with `hsdp`, for comparison with the own
# accumulation, which is the default and can do more. Found with MindSpore 2.10 on CPU: it computes
# in one process only; without `hsdp` it runs and silently never changes a weight, so `hsdp` is
# always on here; what it returns is the *sum* of the micro-batches' losses and it steps with the
# sum of their gradients, so each micro-batch's loss is divided by the whole window's samples
# before. Windows must therefore be alike: equal micro-batches, weights that count samples.


class _Share(nn.Cell):
    """One micro-batch's share of the window's loss: its sum, divided by all samples."""

    def __init__(
        self, model: nn.Cell, loss: Callable[[Any, Any], Sums], form: Any, samples: int
    ) -> None:
        super().__init__(auto_prefix=False)
        self.model, self.loss, self.share = model, loss, 1.0 / samples
        self.batch_of = batch_maker(form)

    def construct(self, *leaves: Any) -> Any:
        total, _, _ = self.loss(self.model, self.batch_of(leaves))
        return total * self.share


class FrameworkEngine(MindSporeEngine):
    """An `Engine` whose micro-steps only collect; the boundary runs MindSpore's compiled step."""

    def __init__(self, job: Job, settings: EngineSettings, group: MindSporeGroup) -> None:
        if settings.metric_names:
            raise ConfigError(
                f"engine.style=framework returns losses alone, but {type(job).__name__} has "
                f"metric_names; leave them out, or use engine.style=own"
            )
        self._batches: list[Any] = []
        self._cell: Any = None
        self._shape: tuple[int, int] | None = None
        super().__init__(job, settings, group)

    def _built_optimizer(self, own: Any, trainable: Sequence[Any]) -> Any:
        """TrainOneStepCell takes the optimizers of `mindspore.nn` only."""
        if own is None:
            rest = {key: v for key, v in self._settings.optimizer.items() if key != "name"}
            return build_optimizer({**rest, "_target_": "mindspore.nn.SGD"}, trainable)
        if not isinstance(own, nn.Optimizer):
            raise ConfigError(
                f"engine.style=framework steps with an optimizer of mindspore.nn, but "
                f"{type(self._job).__name__}.optimizer() builds {type(own).__module__}."
                f"{type(own).__name__}; try engine.style=own"
            )
        return own

    def begin_window(self, window: Window) -> None:
        self._job_state.watch()
        self._window, self._batches = window, []
        self._set_rate(window)

    def micro_step(self, batch: Any, micro_batch: MicroBatch) -> None:
        del micro_batch
        self._batches.append(batch)

    def boundary(self, *, stop: bool = False) -> BoundaryReport:
        window = self._window
        self._check_window()
        self._accumulator.check_constants()
        self._check_weights(window)
        began = time.perf_counter()
        columns = zip(*(flatten(batch)[1] for batch in self._batches), strict=True)
        whole = tuple(ops.concat(column) for column in columns)
        first = self._cell is None
        self._prepare(window)
        seed_everything(derived_seed("step", self._settings.seed, window.update, 0))
        loss = as_float(self._cell(*whole))
        seconds = time.perf_counter() - began
        weights = (p.asnumpy() for p in self._accumulator.parameters)
        if not (math.isfinite(loss) and all(np.isfinite(array).all() for array in weights)):
            raise NonFiniteError(
                f"the loss or a weight became NaN or infinite in update {window.update}; "
                "MindSpore's own step has changed the weights already: resume from the last "
                "checkpoint"
            )
        self._rate.keep()
        self._after_update(window.update)
        return BoundaryReport(
            update=window.update,
            loss=loss,
            weight=float(window.samples),
            stop_requested=stop,
            micro_steps=len(self._batches),
            compute_s=0.0 if first else seconds,
            compile_s=seconds if first else 0.0,
        )

    def _check_weights(self, window: Window) -> None:
        """Raise `JobError` if a micro-batch's weight is not its number of samples, by which the
        framework's step divides. It gives no weights, so each loss is computed once more, without
        a gradient.
        """
        loss = python_loss(self._job)
        with (
            kept_statistics(self._model),
            kept_generators(),
            self._job_state.isolated(),
        ):
            for batch, micro_batch in zip(self._batches, window.micro_batches, strict=True):
                weight, *_ = map(as_float, self._accumulator.losses(loss, batch))
                samples = len(micro_batch.indices)
                if weight != samples:
                    raise JobError(
                        "engine.style=framework divides by the number of samples, but Loss.weight "
                        f"is {weight:g} for {samples} samples in update {window.update}; try "
                        "engine.style=own"
                    )
        ms.set_context(mode=ms.GRAPH_MODE)

    def _prepare(self, window: Window) -> None:
        sizes = {len(micro_batch.indices) for micro_batch in window.micro_batches}
        shape = (len(window.micro_batches), window.samples)
        if len(sizes) != 1 or (self._shape is not None and shape != self._shape):
            raise ConfigError(
                f"engine.style=framework needs windows of equal micro-batches, but update "
                f"{window.update} has {window.samples} samples in {len(window.micro_batches)} "
                f"micro-steps; try accumulation.ragged=drop, or engine.style=own"
            )
        if self._cell is not None:
            return
        from mindspore.parallel.auto_parallel import AutoParallel
        from mindspore.parallel.nn import GradAccumulation

        form, _ = flatten(self._batches[0])
        share = _Share(self._model, compiled_loss(self._job), form, window.samples)
        step = nn.TrainOneStepCell(GradAccumulation(share, shape[0]), self._optimizer)
        step.set_train()
        self._cell = AutoParallel(step)
        self._cell.hsdp()  # without it no weight ever changes, and nothing says so
        self._shape = shape


# ------------------------------------------------------------------ Building


def versions() -> dict[str, str]:
    """Return the versions and devices that decide the bits of a run."""
    return {
        "mindspore": ms.__version__,
        "numpy": np.__version__,
        "device": str(ms.get_context("device_target")),
        "processor": platform.machine(),
    }


def build_engine(job: Job, settings: EngineSettings, group: MindSporeGroup) -> Engine:
    """Build the job's model, the same on every rank, and all that trains it. Collective.

    Args:
        settings: `config.rules.refuse_unsupported` has refused what this engine does not have.

    Raises:
        ConfigError: an optimizer that cannot be had.
        JobError: `model()` or `dataset()` do not give what the contract says, or replicas differ.
    """
    engine = FrameworkEngine if settings.style == "framework" else MindSporeEngine
    return engine(job, settings, group)
