"""`MindSporeEngine`: a job's model, data, optimizer and accumulator behind the loop's `Engine`."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from orchestrator.config.optimizer import chosen, described
from orchestrator.engine.api import BoundaryReport, MicroBatch, Window
from orchestrator.engine.common.boundary.boundary_sums import said_by
from orchestrator.engine.common.boundary.packed_sums import STOP
from orchestrator.engine.common.boundary.update_policy import UpdatePolicy
from orchestrator.engine.common.clock import Clock
from orchestrator.engine.common.evaluation_figures import checked_figures
from orchestrator.engine.common.hyperparameters import Hyperparameters, refuse_scheduler
from orchestrator.engine.common.seeding import derived_seed
from orchestrator.engine.mindspore import state
from orchestrator.engine.mindspore.accumulator import Accumulator
from orchestrator.engine.mindspore.comm.process_group import MindSporeGroup
from orchestrator.engine.mindspore.loader import Loader
from orchestrator.engine.mindspore.loss_sums import Tally
from orchestrator.engine.mindspore.model.building import (
    built_model,
    check_same_weights,
    seed_everything,
)
from orchestrator.engine.mindspore.model.losses import compiled_loss, python_loss
from orchestrator.engine.mindspore.model.model_warnings import RANDOM, advice, layers
from orchestrator.engine.mindspore.model.precision import Precision
from orchestrator.engine.mindspore.model.same_weights import replicas_of
from orchestrator.engine.mindspore.optimizer_step import Applied, Stepper
from orchestrator.engine.mindspore.optimizers import build_optimizer, hyperparameters_of, state_of
from orchestrator.engine.settings import EngineSettings
from orchestrator.errors import JobError
from orchestrator.job import Job
from orchestrator.plan.wire import trailer_numbers


def nothing(model: Any, update: int) -> None:
    """What a job without `after_update` does."""
    del model, update


class MindSporeEngine:
    """An `Engine`; see there for the methods.

    Args:
        job: what to train.
        settings: checked already.
        group: the ranks.
    """

    def __init__(self, job: Job, settings: EngineSettings, group: MindSporeGroup) -> None:
        self._job, self._settings, self._group = job, settings, group
        ms.set_context(mode=ms.GRAPH_MODE if settings.mode == "graph" else ms.PYNATIVE_MODE)
        self._model, self._told = built_model(job, settings)
        given = getattr(job, "optimizer", lambda _: None)(self._model)
        own = chosen(given, settings.optimizer, type(job).__name__)
        refuse_scheduler(getattr(own, "param_groups", ()), job)
        trainable = self._model.trainable_params()
        if not trainable:
            raise JobError("model() has no trainable parameters")
        self._optimizer = self._built_optimizer(own, trainable)
        self._hyperparameters = Hyperparameters(hyperparameters_of(self._optimizer))
        self._names = tuple(settings.metric_names)
        compiled = settings.mode != "pynative"
        precision = Precision(settings.precision, group.transport)
        self._accumulator = Accumulator(
            self._model,
            compiled_loss(job) if compiled else python_loss(job),
            group,
            settings,
            # Two random draws cannot be compared.
            reference=None if layers(self._model, RANDOM) else python_loss(job),
            precision=precision,
            trailer_numbers=trailer_numbers(len(self._names)),
        )
        self._replicas = replicas_of(self._model, self.gather, group.size)
        policy = UpdatePolicy(settings, precision, self.gather)
        self._stepper = Stepper(
            self._accumulator, self._optimizer, policy, check=self._replicas.check
        )
        floats = np.float64 if settings.precision == "float64" else None
        self._loader = Loader(job, settings.seed, settings.loader_workers, floats)
        self._tally = Tally(len(self._names))
        self._window: Window | None = None
        self._compile_mark = 0.0
        self._clock, self._mark = Clock(), group.mark()
        check_same_weights(self.weights_sha256(), self.gather)

    # ------------------------------------------------------------------ an update

    def batches(self, micro_batches: Iterable[MicroBatch]) -> Iterator[Any]:
        return self._loader.batches(micro_batches)

    def begin_window(self, window: Window) -> None:
        self._window = window
        self._clock.begin()
        self._compile_mark, self._mark = self._compile_total(), self._group.mark()
        self._tally.begin()
        self._accumulator.clear()
        self._hyperparameters.check(f"before update {window.update}")
        self._stepper.set_rate(window.learning_rate)
        self._hyperparameters.keep()
        self._group.silence.keep(f"in mid-window of update {window.update}")

    def micro_step(self, batch: Any, micro_batch: MicroBatch) -> None:
        window = self._window
        if window is None or micro_batch.update != window.update:
            raise RuntimeError(f"a micro-step of update {micro_batch.update} in no window of it")
        with self._clock.compute():
            seed = derived_seed("step", self._settings.seed, micro_batch.update, micro_batch.start)
            seed_everything(seed)
            self._tally.add(self._accumulator.add(batch))

    def boundary(self, *, stop: bool = False) -> BoundaryReport:
        window = self._window
        if window is None:
            raise RuntimeError("a boundary without a window")
        self._hyperparameters.check("inside a window")
        with self._clock.compute():
            trailer = self._tally.trailer()  # waits for the losses, so the rest is not computing
            trailer.flags[STOP] = int(stop)
            self._replicas.tell(trailer, window.update)
        with self._clock.wait(), self._group.silence.lifted():
            buckets = self._accumulator.reduce(trailer.numbers())
        self._group.silence.end()
        scale = self._accumulator.precision.scale
        with self._clock.optimize():
            applied = self._stepper.apply(window.update, buckets, len(self._names), self._tally)
        self._window = None
        self._hyperparameters.keep()
        if applied.stepped:
            getattr(self._job, "after_update", nothing)(self._model, window.update)
            self._hyperparameters.check(
                f"in after_update of update {window.update}", jobs_turn=True
            )
        return self._report(window, applied, scale)

    def _report(self, window: Window, applied: Applied, scale: float) -> BoundaryReport:
        compile_s = self._compile_total() - self._compile_mark
        if compile_s:
            self._say(
                f"update {window.update}: compiled in {compile_s:.2f} s, which later updates do "
                f"not take"
            )
        sent, seconds = self._group.since(self._mark), self._clock.seconds()
        seconds["compute_s"] = max(0.0, seconds["compute_s"] - compile_s)
        seconds["compile_s"] = compile_s
        # Right after a reduction, so that no rank is compiling meanwhile.
        seconds["plain_step_s"] = self._accumulator.plain_step_s()
        became: dict[str, Any] = {
            "applied": applied.stepped,
            "gradient_norm": applied.norm,
            "loss_scale": scale,
        }
        return BoundaryReport(
            update=window.update,
            micro_steps=self._tally.micro_steps,
            collectives=sent.collectives,
            bytes_on_wire=sent.bytes_on_wire,
            **said_by(applied.totals, self._names),
            **seconds,
            **became,
        )

    # ------------------------------------------------------------------ around updates

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        row = Tensor(np.asarray([list(numbers)], np.float64))
        return self._group.all_gather(row).asnumpy().tolist()

    def evaluate(self) -> dict[str, float]:
        before = [(cell, cell.training) for _, cell in self._model.cells_and_names()]
        self._model.set_train(False)
        try:
            figures = getattr(self._job, "evaluate", lambda _: {})(self._model)
        finally:
            for cell, training in before:
                cell.add_flags(training=training)
        return checked_figures(figures, self._job)

    def check_replicas(self) -> None:
        self._replicas.check_all()

    def optimizer_used(self) -> dict[str, Any]:
        """What steps the weights: its class, who chose it, and its groups of parameters."""
        return described(self._optimizer, self._settings.optimizer)

    def parameter_count(self) -> int:
        return sum(int(p.size) for p in self._accumulator.parameters)

    def gather_state(self) -> None:
        """Nothing: every rank holds all of it."""

    def holds_state(self) -> bool:
        return True

    def save_state(self, folder: Path) -> dict[str, Any]:
        return self.snapshot().save_state(folder)

    def snapshot(self) -> state.Kept:
        """What `save_state` would write now, for another thread."""
        weights = self._model.parameters_dict()
        found = {state.WEIGHTS: weights, state.OPTIMIZER: state_of(self._optimizer, weights)}
        extra = {"engine": "mindspore", "precision": self._accumulator.precision.state()}
        return state.Kept({name: state.arrays_of(part) for name, part in found.items()}, extra)

    def load_state(self, folder: Path, extra: Mapping[str, Any]) -> None:
        if extra.get("engine") != "mindspore":
            raise JobError(
                f"{folder} is a checkpoint of another engine; its weights alone fit here"
            )
        weights = self._model.parameters_dict()
        state.load(folder / state.WEIGHTS, weights)
        state.load(folder / state.OPTIMIZER, state_of(self._optimizer, weights))
        self._accumulator.precision.load(extra["precision"])
        self._hyperparameters.keep()

    def load_weights(self, path: Path) -> None:
        state.load_weights(path, self._model.parameters_dict())

    def weights_sha256(self) -> str:
        return state.digest(self._model.parameters_dict())

    def collectives_beside(self) -> int:
        return 0

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
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def warnings(self, micro_batches: int | None = None) -> list[str]:
        found = advice(self._model, ranks=self._group.size, micro_batches=micro_batches)
        return [*self._told, *found]

    # ------------------------------------------------------------------ parts

    def _built_optimizer(self, own: Any, trainable: Sequence[Any]) -> Any:
        return build_optimizer(self._settings.optimizer, trainable) if own is None else own

    def _compile_total(self) -> float:
        return self._accumulator.compile_s + self._stepper.compile_s

    def _say(self, sentence: str) -> None:
        print(sentence, flush=True)


def _bytes(parameters: Iterable[Any]) -> int:
    return sum(parameter.size * parameter.itemsize for parameter in parameters)
