"""Probe that a job's loss is a sum over samples, by computing it on a few samples.

The loss of some samples together is compared with the sum of the losses of parts of them: total,
weight, and gradient, since a head that begins at zero hides in the total what it hides not in the
gradient. Rounding must not hide a difference, so the numbers are float64: a copy of the model
computes them, without autocast. Where a copy cannot (a job that keeps float32 tensors of its own),
the model itself does, as it is.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]  # the common base
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]  # the common base
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from orchestrator.data import generator_states
from orchestrator.engine.torch.loader import collate_of
from orchestrator.engine.torch.model import (
    compile_contexts,
    doubled,
    in_evaluation,
    kept_state,
    moved,
    seed_everything,
)
from orchestrator.errors import JobError, shortened
from orchestrator.job import Job, dataset_of, is_coupled
from orchestrator.rundir.warnings import warn

log = logging.getLogger(__name__)

MOST_PARAMETERS = 100_000_000
"""Of a model that is copied in float64."""

_COMPARED = 4
"""Samples that are compared."""

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}  # relative; 5e-2 in halves
_OF_GRADIENTS = 100.0  # times the tolerance of the total

_REPEATS = 8
"""Of a loss that seems to be no sum: one that draws random numbers may repeat once by chance."""


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to compute losses: a model, in which numbers, in training mode or in evaluation."""

    model: Module
    double: bool
    copied: bool
    training: bool = False


@dataclass(frozen=True, slots=True)
class _Computed:
    """The loss of some samples."""

    total: float
    weight: float
    gradient: list[Tensor]
    metrics: dict[str, float]

    def is_finite(self) -> bool:
        return math.isfinite(self.total) and math.isfinite(self.weight)

    def equals(self, other: _Computed) -> bool:
        return (self.total, self.weight) == (other.total, other.weight) and all(
            map(torch.equal, self.gradient, other.gradient)
        )


class _NoSumError(Exception):
    """The loss of samples together is another than the sum of the losses of parts of them."""


class _NarrowestDtype(TorchDispatchMode):
    """Within it, the narrowest floating dtype that an operation gives is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            is_narrower = isinstance(tensor, Tensor) and tensor.is_floating_point()
            if is_narrower and tensor.dtype.itemsize < self.dtype.itemsize:
                self.dtype = tensor.dtype
        return result


def check_samples(
    job: Any,
    model: Module,
    indices: Sequence[int],
    *,
    device: torch.device,
    precision: str,
    seed: int,
    norm: str = "",
) -> bool:
    """Check that a job's samples and losses do not depend on how a batch is split. Not collective.

    Warns of random numbers that `collate` draws. A loss with random numbers of its own, and a
    compiled model, are not compared, which is warned of; nor is a job that declares it or has
    `embed`.

    Args:
        indices: of the samples of a micro-batch.
        precision: see `EngineSettings.precision`.
        seed: of the random numbers that the check draws.
        norm: what `engine.norm` put in the place of batch norms, if there were any.

    Returns:
        Whether the loss was compared, and is a sum.

    Raises:
        JobError: the loss is no sum over samples, and the job does not declare `batch_dependent`.
    """
    dataset, collate, name = dataset_of(job), collate_of(job), type(job).__name__
    chosen = list(indices[:_COMPARED])
    following = chosen[-1]
    while len(chosen) < min(_COMPARED, len(dataset)):  # two samples hide more than four
        following = (following + 1) % len(dataset)
        if following not in chosen:
            chosen.append(following)
    seed_everything(seed)
    samples = [dataset[index] for index in chosen]
    before = generator_states()
    collate(samples)
    if generator_states() != before:
        warn(
            f"{name}: collate() draws random numbers for a whole micro-batch, so they depend on "
            f"how a batch is split over ranks and micro-steps; draw them in dataset[i], with "
            f"augments = True"
        )
    declared = getattr(job, "talks_in_window", False) or getattr(job, "batch_dependent", False)
    if declared or len(samples) < 2 or is_coupled(job):
        return False
    probe = _Probe(job, collate, samples, device, seed, norm)
    computed, compiled, failure = False, False, ""
    for way in _ways(model, precision):
        # Not even tried: torch would compile for these sizes. Copies of what `compile()` has
        # compiled in place are not compiled.
        if compile_contexts(way.model):
            compiled = True
            continue
        try:
            if probe.is_sum(way):
                if way.training:
                    _warn_of_evaluation(job, probe, way)
                return True
            computed = True
        except JobError:
            raise
        except Exception as error:  # noqa: BLE001  # of the job's own code, on so few samples
            failure = f"fails on {len(samples) // 2} or {len(samples)} samples in evaluation mode "
            failure += f"({type(error).__name__}: {shortened(str(error), 200)})"
    if compiled and not computed and not failure:
        warn(
            f"the model is compiled, so it was not checked whether {name}.loss() is a sum over "
            "samples; leave torch.compile out of one short run, which checks it"
        )
    elif not computed or probe.not_finite:
        failure = failure if not computed else f"of {len(samples)} samples is not finite"
        warn(f"{name}.loss() {failure}, so it was not checked whether it is a sum")
    elif probe.random:
        warn(
            f"{name}.loss() draws random numbers, so it was not checked whether loss() is a sum "
            "over samples; leave them out of one short run, which checks it"
        )
    return False


def _warn_of_evaluation(job: Any, probe: _Probe, way: _Way) -> None:
    """Warn of a loss that is a sum in training mode alone, where held-out data is evaluated."""
    own = getattr(type(job), "validation", None)
    if own in (None, Job.validation):
        return
    evaluation = replace(way, training=False)
    try:
        if not probe.has_same_losses(evaluation):
            probe.is_sum(evaluation)
    except JobError:
        warn(
            f"{type(job).__name__}.loss() is a sum over samples in training mode, but not in "
            "evaluation mode, so held-out figures depend on how held-out data is split: "
            f"{probe.seen}"
        )
    except Exception as error:  # noqa: BLE001  # of the job's own code, on so few samples
        log.info("no loss in evaluation mode (%s: %s)", type(error).__name__, error)


def _ways(model: Module, precision: str) -> Iterator[_Way]:
    """Yield the ways to compute the losses, the most exact first; a copy is built when needed."""
    # A copy of what `torch.compile()` has returned is compiled, too, and would not be computed.
    copies_are_compiled = any(
        getattr(layer, "dynamo_ctx", None) is not None for layer in model.modules()
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters <= MOST_PARAMETERS and not copies_are_compiled:
        exact: Module | None = None
        try:
            exact = doubled(copy.deepcopy(model))
        except Exception as error:  # noqa: BLE001  # of the model's own code, or a lack of memory
            log.info("no copy of the model in float64 (%s: %s)", type(error).__name__, error)
        if exact is not None:
            # In training mode first: that is what the run computes.
            yield _Way(exact, double=True, copied=True, training=True)
            yield _Way(exact, double=True, copied=True)
            del exact  # frees it before the model itself computes
    yield _Way(model, double=precision == "float64", copied=False)


class _Probe:
    """A comparison of the loss of a few samples with those of parts of them.

    Attributes:
        not_finite: a loss of the latest comparison was NaN or infinite.
        random: the same samples have had another loss when computed again.
        seen: why the latest comparison was refused.
    """

    def __init__(
        self,
        job: Any,
        collate: Callable[[list[Any]], Any],
        samples: list[Any],
        device: torch.device,
        seed: int,
        norm: str,
    ) -> None:
        self._job, self._collate, self._samples = job, collate, samples
        self._device, self._seed, self._norm = device, seed, norm
        self.not_finite, self.random, self.seen = False, False, ""
        self._narrowest = _NarrowestDtype()
        self._halves: list[tuple[list[Any], _Computed]] = []

    def is_sum(self, way: _Way) -> bool:
        """Return whether the loss is a sum; False if it cannot be compared in this way.

        Raises:
            JobError: it is no sum.
            Exception: whatever the job's code raises.
        """
        with self._mode_of(way):
            try:
                return self._compare(way)
            except _NoSumError as difference:
                if self._is_random(way):
                    self.random = True
                    return False
                self.seen = str(difference)
        replaced = (
            f"engine.norm={self._norm} takes its statistics over padded positions, too, which "
        )
        replaced += "may be the reason: use a norm over channels alone in model(). "
        raise JobError(
            f"{type(self._job).__name__}.loss() is not a sum over samples, so updates would depend "
            f"on how a batch is split: {self.seen}. {replaced if self._norm else ''}Give sums, "
            "without a mean, maximum or normalisation over the micro-batch. If samples need each "
            "other, define embed() and loss_of_embeddings(). To accept it, set batch_dependent = "
            "True in the class"
        )

    def has_same_losses(self, way: _Way) -> bool:
        """Return whether all samples and each half of them have in this way the very losses and
        gradients of the latest comparison: then model and loss() do not depend on what differs.

        Raises:
            Exception: whatever the job's code raises.
        """
        with self._mode_of(way):
            return all(self._loss(way, samples).equals(loss) for samples, loss in self._halves)

    def _is_random(self, way: _Way) -> bool:
        """Return whether the loss of the same samples is another at each call."""
        losses = [
            self._loss(way, self._samples, seed=self._seed + number, with_gradient=False)
            for number in range(_REPEATS)
        ]
        tolerance = self._tolerance(way)
        return any(_differ(losses[0].total, [loss.total], tolerance) for loss in losses)

    def _tolerance(self, way: _Way) -> float:
        """Return the relative tolerance in the numbers of the latest losses."""
        return _TOLERANCE.get(self._dtype(way), 5e-2)

    def _dtype(self, way: _Way) -> torch.dtype:
        return self._narrowest.dtype if way.copied else _dtype_of(way.model)

    def _compare(self, way: _Way) -> bool:
        """Return whether the loss is a sum, see `is_sum`.

        Raises:
            _NoSumError: it is none, as far as one computation of each part shows.
        """
        samples, half = self._samples, len(self._samples) // 2
        # The first loss alone notes the dtype: the others compute in the same.
        self._narrowest = _NarrowestDtype()
        whole = self._loss(way, samples, notes_dtype=way.copied)
        # A loss with random numbers of its own cannot be compared.
        again = self._loss(way, samples, seed=self._seed + 1, with_gradient=False)
        turned = self._loss(way, samples[::-1], with_gradient=False)
        left, right = self._loss(way, samples[:half]), self._loss(way, samples[half:])
        self._halves = [(samples, whole), (samples[:half], left), (samples[half:], right)]
        # The magnitude of a sum, say, adds up for parts that have one sign.
        alone = [self._loss(way, [sample], with_gradient=False) for sample in samples]
        # Samples of one class, say, may all be in one half; or come once in the whole.
        twice = self._loss(way, samples[:half] * 2, with_gradient=False)
        computed = (whole, again, turned, left, right, *alone, twice)
        self.not_finite = not all(computation.is_finite() for computation in computed)
        tolerance = self._tolerance(way)
        if not whole.is_finite():
            return False
        if _differ(whole.total, [again.total], tolerance):
            self.random = True
            return False
        # The order of samples changes rounding alone, which shows how large that is here; where it
        # changes more, the loss depends on it.
        rounding = 8 * abs(whole.total - turned.total)
        ordered = _differ(whole.total, [turned.total], 10 * tolerance)
        count = len(samples)
        comparisons = [
            (f"{count} samples", f"{half} and {count - half} of them", whole, [left, right]),
            (f"{count} samples", "each of them alone", whole, alone),
            (f"{half} samples taken twice", "them taken once", twice, [left, left]),
        ]
        numbers = str(self._dtype(way)).removeprefix("torch.")
        for together, apart, all_of_it, parts in comparisons:
            if not all(loss.is_finite() for loss in (all_of_it, *parts)):
                continue
            totals, weights = [part.total for part in parts], [part.weight for part in parts]
            if _differ(all_of_it.total, totals, tolerance, rounding) or _differ(
                all_of_it.weight, weights, max(tolerance, 1e-6)
            ):
                raise _NoSumError(
                    f"total and weight of {together} are {all_of_it.total:.6g} and "
                    f"{all_of_it.weight:g}, but of {apart} "
                    f"{' + '.join(f'{total:.6g}' for total in totals)} and "
                    f"{' + '.join(f'{weight:g}' for weight in weights)}, off by "
                    f"{all_of_it.total - sum(totals):.1g} and "
                    f"{all_of_it.weight - sum(weights):.1g} (computed in {numbers})"
                )
        if self.not_finite:  # after the finite parts, of which one may show the difference
            return False
        if ordered:
            raise _NoSumError(
                f"the total of {count} samples is {whole.total:.6g}, but in the opposite order "
                f"{turned.total:.6g} (computed in {numbers})"
            )
        # In halves the tolerance would be larger than the gradient itself.
        if tolerance <= _TOLERANCE[torch.float32]:
            off = _gradient_difference(whole, left, right)
            if off > _OF_GRADIENTS * tolerance:
                raise _NoSumError(
                    f"the gradient of {count} samples is not the sum of those of {half} and "
                    f"{count - half} of them: it is off by {off:.1g} of its size (computed in "
                    f"{numbers})"
                )
        self._warn_of_metrics(whole, again, [left, right], alone, max(tolerance, 1e-5))
        mode = "training" if way.training else "evaluation"
        log.info(
            "%s.loss() of %d samples is the sum of the losses of its parts, to %g (computed in "
            "%s, in %s mode)",
            type(self._job).__name__,
            count,
            tolerance,
            numbers,
            mode,
        )
        return True

    def _warn_of_metrics(
        self,
        whole: _Computed,
        again: _Computed,
        halves: Sequence[_Computed],
        alone: Sequence[_Computed],
        tolerance: float,
    ) -> None:
        """Warn of metrics that are no sums over samples: no update depends on them, but what is
        shown and what `train.keep_best` chooses by would depend on the split.
        """
        for name, value in whole.metrics.items():
            if _differ(value, [again.metrics.get(name, math.nan)], tolerance):
                continue  # it is random
            for parts in (halves, alone):
                shares = [part.metrics.get(name, math.nan) for part in parts]
                if math.isfinite(sum(shares) + value) and _differ(value, shares, tolerance):
                    warn(
                        f"{type(self._job).__name__}: metric '{name}' is not a sum over samples: "
                        f"{value:.6g} for {len(self._samples)} samples, but "
                        f"{' + '.join(f'{share:.6g}' for share in shares)} for parts of them, so "
                        "its figures depend on how a batch is split. Give the sum: it is divided "
                        "by the weight of all samples"
                    )
                    break

    @contextmanager
    def _mode_of(self, way: _Way) -> Generator[None]:
        """Have the model compute as in training, but for layers that draw random numbers and batch
        norms, which other messages are about; or have all of it in evaluation mode.
        """
        training = [layer for layer in way.model.modules() if layer.training and way.training]
        with in_evaluation(way.model):
            for layer in training:
                draws = isinstance(layer, (_DropoutNd, nn.MultiheadAttention)) or (
                    isinstance(layer, nn.RNNBase) and layer.dropout > 0
                )
                layer.training = not (draws or isinstance(layer, _BatchNorm))
            yield

    def _loss(
        self,
        way: _Way,
        samples: list[Any],
        *,
        seed: int | None = None,
        with_gradient: bool = True,
        notes_dtype: bool = False,
    ) -> _Computed:
        seed_everything(self._seed if seed is None else seed)
        batch = moved(self._collate(samples), self._device, double=way.double)
        # What loss() counts on the job is not to count these calls.
        job = copy.copy(self._job)
        # Operators that take functions (flexible attention, say) refuse such a mode; the model
        # itself is computed without. Each operation takes several times as long within it.
        with kept_state(way.model), self._narrowest if notes_dtype else nullcontext():
            loss = job.loss(way.model, batch)
            gradient: list[Tensor] = []
            if with_gradient and way.copied and loss.total.requires_grad:
                trained = [p for p in way.model.parameters() if p.requires_grad]
                gradient = _gradient_of(loss.total, trained)
        weight = loss.weight.detach() if isinstance(loss.weight, Tensor) else loss.weight
        metrics = {name: _number(value) for name, value in loss.metrics.items()}
        return _Computed(float(loss.total.detach()), float(weight), gradient, metrics)


def _number(value: Any) -> float:
    """Return a metric as a number; NaN for what is none, which the first micro-step refuses."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return math.nan


def _gradient_of(total: Tensor, trained: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradient; [] where the graph allows none of this kind (checkpoints of activations
    in torch's older way, say), in which totals alone are compared.
    """
    try:
        gradients: Any = torch.autograd.grad(total, trained, allow_unused=True)
    except RuntimeError as error:
        log.info("gradients are not compared: %s", error)
        return []
    return [
        torch.zeros_like(parameter) if part is None else part
        for parameter, part in zip(trained, gradients, strict=True)
    ]


def _dtype_of(model: Module) -> torch.dtype:
    """Return what a model computes in, at most: float32, or its narrowest parameters' dtype."""
    dtypes = [torch.float32, *(p.dtype for p in model.parameters() if p.is_floating_point())]
    return min(dtypes, key=lambda dtype: dtype.itemsize)


def _differ(whole: float, parts: Sequence[float], tolerance: float, rounding: float = 0.0) -> bool:
    size = max(abs(whole), sum(map(abs, parts)))
    return abs(whole - sum(parts)) > max(tolerance * size, rounding)


def _gradient_difference(whole: _Computed, left: _Computed, right: _Computed) -> float:
    """Return by how much, relative to their sizes, the gradients of the parts differ from the
    whole's; 0 where one could not be computed.
    """
    if not (whole.gradient and left.gradient and right.gradient):
        return 0.0
    size = difference = 0.0
    for all_of_it, part, other in zip(whole.gradient, left.gradient, right.gradient, strict=True):
        size += float(part.norm()) + float(other.norm())
        difference += float((all_of_it - part - other).norm())
    return difference / size if size else 0.0
