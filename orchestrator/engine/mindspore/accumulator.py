"""Gradient accumulation in MindSpore: a compiled micro-step, one flat reduction.

Usable without the rest of this package, from a loop of your own:

    loss = lambda model, batch: (total, weight, {})
    accumulator = Accumulator(model, loss, group, EngineSettings())
    for batch in micro_batches:
        accumulator.add(batch)          # forward, backward, add up; nothing is sent
    gradients, trailer = accumulator.reduce(trailer)  # collective; `Trailer` holds the ranks' sums
    accumulator.clear()

Gradients are *sums* over samples; the boundary divides by the sum of weights (see `engine`).
"""

from __future__ import annotations

import logging
import math
import random
import re
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from orchestrator.data import kept_generators
from orchestrator.engine.api import EngineSettings
from orchestrator.engine.common.job_checks import check_loss
from orchestrator.engine.mindspore.constants import Constants
from orchestrator.engine.mindspore.group import MindSporeGroup
from orchestrator.engine.mindspore.model import (
    Precision,
    draws_advice,
    gradient_order,
    kept_statistics,
)
from orchestrator.errors import JobError
from orchestrator.job import Job, Loss
from orchestrator.plan.wire import bucket_count
from orchestrator.rundir.warnings import warn

log = logging.getLogger(__name__)

# ------------------------------------------------------------------ Compilation
# `engine.mode`: "pynative" leaves functions as they are, "jit" compiles them, "graph" compiles
# them with the framework in graph mode globally. The time of first calls is kept apart.


def explain(error: Exception, what: str) -> str:
    """Return the compiler's message, cut to its first part and the lines of the user's own code."""
    head, _, trace = str(error).partition("The Traceback of Net Construct Code:")
    for stack in ("- The Function Call Stack", "- C++ Call Stack"):
        head = head.partition(stack)[0]
    message = "\n".join(line for line in head.splitlines() if line.strip(" -"))
    frames = re.split(r"^# \d+ In file ", trace.partition("(See file")[0], flags=re.MULTILINE)[1:]
    not_the_users = (str(Path(ms.__file__).parent), str(Path(__file__).parent))
    own = [f"in {frame.rstrip()}" for frame in frames if not frame.startswith(not_the_users)]
    return "\n".join([f"{what} does not compile: {message[:1200]}", *own[-2:]])


_ERRORS = (RuntimeError, TypeError, ValueError, NameError, AttributeError, SyntaxError, LookupError)
"""What MindSpore's compiler raises for code that it cannot compile, or that is wrong."""


class Compiled:
    """A function, compiled once for each set of shapes that it meets.

    Args:
        function: takes and gives tensors only.
        mode: "pynative", "jit" or "graph".
        jit_level: "O0" or "O1"; None for the framework's default.
        what: how messages call the function.
    """

    def __init__(
        self, function: Callable[..., Any], *, mode: str, jit_level: str | None, what: str
    ) -> None:
        self._what, self._mode = what, mode
        self._met: set[Any] = set()
        self.compile_s = 0.0
        if mode == "pynative":
            self._call = function
        else:
            options: dict[str, Any] = {"jit_level": jit_level} if jit_level else {}
            self._call = ms.jit(function, **options)

    def __call__(self, *tensors: Tensor) -> Any:
        met = tuple((tensor.shape, str(tensor.dtype)) for tensor in tensors)
        if met in self._met or self._mode == "pynative":
            return self._call(*tensors)
        began = time.perf_counter()
        try:
            result = self._call(*tensors)
        except _ERRORS as error:
            advice = "without compilation it may work: try engine.mode=pynative"
            raise JobError(f"{explain(error, self._what)}\n{advice}") from error
        self._met.add(met)
        self.compile_s += time.perf_counter() - began
        return result


# ------------------------------------------------------------------ Losses in graphs
# Inside a graph the compiler cannot build a `Loss`: it falls back to Python for it and *silently
# cuts the gradient there*. So the compiled step uses a twin of `job.loss` in which the name `Loss`
# is a plain function that gives a tuple. The accumulator checks the first micro-batch against
# PyNative mode.


Sums = tuple[Any, Any, Any]


def as_sums(total: Any, weight: Any, metrics: Mapping[str, Any] | None = None) -> Sums:
    """Replace `Loss` in a graph."""
    return total, weight, metrics


def python_loss(job: Job) -> Callable[[Any, Any], Sums]:
    """`job.loss` as a function that gives a tuple, for PyNative mode.

    It raises `JobError` when the job's loss is not what the contract says.
    """
    names = tuple(getattr(job, "metric_names", ()))

    def loss(model: Any, batch: Any) -> Sums:
        result = job.loss(model, batch)
        check_loss(result, names, Tensor)
        return result.total, result.weight, result.metrics

    return loss


def compiled_loss(job: Job) -> Callable[[Any, Any], Sums]:
    """Return the twin of `job.loss` for graphs."""
    method: Any = type(job).loss
    names = {
        key: (as_sums if value is Loss else value)
        for key, value in method.__globals__.items()
        if key == "__builtins__" or not (key.startswith("__") and key.endswith("__"))
    }
    # The compiler looks global names up in the function's module, not in its __globals__.
    twin = types.ModuleType(f"{method.__module__}_in_a_graph")
    twin.__dict__.update(names)
    sys.modules[twin.__name__] = twin
    function = types.FunctionType(
        method.__code__, twin.__dict__, method.__name__, method.__defaults__, method.__closure__
    )
    function.__kwdefaults__ = method.__kwdefaults__
    function.__module__ = twin.__name__
    return types.MethodType(function, job)


def mean_refusal(whole: Sequence[float], left: Sequence[float], right: Sequence[float]) -> str:
    """Return why the loss of a batch is the mean of those of its halves; "" if it is not.

    Args:
        whole, left, right: weight and total of the batch and of its halves.

    >>> mean_refusal([3, 5.0], [1, 3.0], [2, 6.0])[:40]
    'Loss.total is a mean, and Loss.weight is'
    >>> mean_refusal([3, 9.0], [1, 3.0], [2, 6.0])
    ''
    """
    (weight, total), (left_weight, left_total), (right_weight, right_total) = whole, left, right
    size = abs(left_total) + abs(right_total)
    weights = left_weight + right_weight
    if min(left_weight, right_weight) <= 0 or not math.isclose(weight, weights, rel_tol=1e-6):
        return ""
    mean = (left_weight * left_total + right_weight * right_total) / weights
    # Narrow, as a loss that couples samples otherwise is no mistake that is certain.
    is_mean = abs(total - mean) <= 1e-3 * size
    if not (is_mean and abs(total - left_total - right_total) > 0.1 * size):
        return ""
    return (
        f"Loss.total is a mean, and Loss.weight is {weight:g}: it would be divided twice. Give the "
        "sum, with reduction='sum' or .sum(), or multiply the mean by what it was divided by"
    )


# ------------------------------------------------------------------ Accumulator


framework: Any = ms  # its annotations are not those of its behaviour
BLOCK = 4096


class Accumulator:
    """Sums of gradients over the micro-steps of a window.

    Args:
        model: the network; its trainable parameters are the ones accumulated.
        loss: (model, batch) -> (total, weight, metrics), all sums; compiled unless mode is
            pynative.
        settings: which metrics to keep, in order; the format to compute in; how to compile (see
            `Compiled`); the size of a bucket of the flat buffer (see `plan.wire.bucket_count`).
        reference: the same loss for PyNative mode: the first micro-batch's gradient is compared
            with its, because a graph may cut a gradient silently. None skips that.
        trailer_numbers: how many numbers ride along.
        refuse_means: compute the loss of the first micro-batch of several samples once more, whole
            and in halves and without compilation, and refuse a mean. False for a loss that calls
            collectives: ranks may have first micro-batches of different sizes.

    Attributes:
        clear: sets all sums to zero.
    """

    def __init__(
        self,
        model: nn.Cell,
        loss: Callable[[Any, Any], Sums],
        group: MindSporeGroup,
        settings: EngineSettings,
        *,
        reference: Callable[[Any, Any], Sums] | None = None,
        trailer_numbers: int = 0,
        refuse_means: bool = True,
    ) -> None:
        self.parameters: tuple[Parameter, ...] = tuple(model.trainable_params())
        self.dtype: Any = self.parameters[0].dtype
        for parameter in self.parameters:
            if parameter.dtype not in (ms.float32, ms.float64) or parameter.dtype != self.dtype:
                raise JobError(
                    f"parameter {parameter.name} is {parameter.dtype}, but all parameters have to "
                    "be float32, in which gradients add up; to compute in half precision, set "
                    "train.precision=float16"
                )
        self._model, self._group, self._names = model, group, tuple(settings.metric_names)
        self._loss, self._reference = loss, reference
        self._may_be_mean: Callable[[Any, Any], Sums] | None = None
        if refuse_means:
            self._may_be_mean = reference or loss
        self._constants: Constants | None = None
        self._mode, self._jit_level = settings.mode, settings.jit_level
        self.precision = Precision(settings.precision)  # sums are those of the scaled losses
        self._sample: tuple[Any, Sequence[Tensor]] | None = None
        self.sums: tuple[Parameter, ...] = tuple(
            Parameter(ops.zeros_like(p), name=f"sum.{p.name}", requires_grad=False)
            for p in self.parameters
        )
        self._numbers = sum(int(p.size) for p in self.parameters)
        self._whole = self._numbers + trailer_numbers
        payload = self._whole * int(self.parameters[0].itemsize)
        count = bucket_count(payload, settings.bucket_bytes, early=False)
        self._width = math.ceil(self._whole / count)
        self._steps: dict[Any, Compiled] = {}
        sums = self.sums
        shapes = tuple((int(p.size), p.shape) for p in self.parameters)

        def pack(*trailer: Tensor) -> Tensor:
            parts: Any = ()
            for total in sums:
                parts = (*parts, total.reshape(-1))
            return ops.concat((*parts, *trailer))

        def unpack(whole: Tensor) -> Any:
            gradients: Any = ()
            start = 0
            for size, shape in shapes:
                gradients = (*gradients, whole[start : start + size].reshape(shape))
                start += size
            return gradients

        def clear() -> bool:
            for total in sums:
                ops.assign(total, ops.zeros_like(total))
            return True

        self._pack = self.compile(pack, "the packing of gradients")
        self._unpack = self.compile(unpack, "the unpacking of gradients")
        self.clear = self.compile(clear, "the clearing of gradients")

    def compile(self, function: Callable[..., Any], what: str) -> Compiled:
        """Compile in this accumulator's mode."""
        return Compiled(function, mode=self._mode, jit_level=self._jit_level, what=what)

    @property
    def compile_s(self) -> float:
        """Seconds spent in first calls of compiled functions so far."""
        every = (*self._steps.values(), self._pack, self._unpack, self.clear)
        return sum(compiled.compile_s for compiled in every)

    # ------------------------------------------------------------------ micro-steps

    def check_trained(self) -> None:
        """Raise `JobError` if other parameters are trained than those whose gradients add up."""
        known = set(map(id, self.parameters))
        for parameter in self._model.get_parameters():
            if parameter.requires_grad != (id(parameter) in known):
                change = "began" if parameter.requires_grad else "ceased"
                raise JobError(
                    f"parameter {parameter.name} {change} to require gradients after the engine "
                    "was built, which would have no effect: set requires_grad in model(), and "
                    "start another run from this one's weights (train.initial_weights)"
                )

    def check_constants(self) -> None:
        """Raise `JobError` if values that compiled code reads differ from the first call's."""
        if self._mode != "pynative":
            self._constants = self._constants or Constants(self._loss, self._model)
            self._constants.check()

    def add(self, batch: Any) -> Tensor:
        """Forward and backward of one micro-batch; its gradient is added up. Nothing is sent.

        Returns:
            A tensor [weight, total, *metrics], not waited for.

        Raises:
            JobError: the loss cannot be compiled, or is a mean.
        """
        form, leaves = flatten(batch)
        self.check_constants()
        result = self._add(form, leaves)
        if self._may_be_mean is not None:
            self._check_mean(self._may_be_mean, form, leaves)
        return result

    def _add(self, form: Any, leaves: Sequence[Tensor]) -> Tensor:
        if form in self._steps:
            return self._steps[form](*leaves)
        code = getattr(getattr(self._loss, "__func__", self._loss), "__code__", None)
        location = f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""
        what = f"the job's loss{location}"
        step = self.compile(self._micro_step(self._gradients(self._loss, form)), what)
        self._steps[form] = step
        if self._reference is None or self._mode == "pynative":
            return step(*leaves)
        self._sample = self._sample or (form, leaves)
        before = [total.asnumpy().copy() for total in self.sums]
        drawn = repr((random.getstate(), np.random.get_state()))
        # First, because its error messages are better than a graph's.
        wanted = self._reference_gradient(form, leaves)
        if drawn != repr((random.getstate(), np.random.get_state())):
            raise JobError(
                "loss() or the model draws random numbers from NumPy or Python, which a compiled "
                "graph keeps as constants: use ops.standard_normal, or engine.mode=pynative"
            )
        result = step(*leaves)
        added = [total.asnumpy() - old for total, old in zip(self.sums, before, strict=True)]
        differing = self._differing(added, [part.asnumpy() for part in wanted])
        if differing is not None:
            again = self._reference_gradient(form, leaves)
            arrays = ([part.asnumpy() for part in parts] for parts in (again, wanted))
            if self._differing(*arrays) is None:
                raise JobError(
                    f"compiled, the gradient of {differing} is not the one that plain Python "
                    f"gives: MindSpore's graph compiler cuts gradients at code that it leaves to "
                    f"Python (objects, numpy, .asnumpy() in loss or model); use tensor operations "
                    f"there, and call Loss in the job's own loss(); or engine.mode=pynative"
                )
            self._reference = self._sample = None  # random numbers, which cannot be compared
            warn(draws_advice("loss() or the model"))
        return result

    def _check_mean(
        self, loss: Callable[[Any, Any], Sums], form: Any, leaves: Sequence[Tensor]
    ) -> None:
        """Refuse a loss that is the mean of those of its samples by their weights, at the first
        micro-batch that has several. Without a graph to read, as torch has, its figures tell.
        """
        sizes = {leaf.shape[0] if leaf.ndim else 0 for leaf in leaves}
        if len(sizes) != 1 or min(sizes) < 2:
            return
        self._may_be_mean = None
        half = min(sizes) // 2
        parts = leaves, [leaf[:half] for leaf in leaves], [leaf[half:] for leaf in leaves]
        try:
            # Statistics and NumPy's numbers go on as if this had not been.
            with kept_generators(), kept_statistics(self._model):
                rows = [self.losses(loss, batch_maker(form)(tuple(part)))[:2] for part in parts]
            whole, left, right = (
                [float(x.asnumpy().item() if isinstance(x, Tensor) else x) for x in row]
                for row in rows
            )
        except JobError:
            raise
        except Exception as error:  # noqa: BLE001  # of code that takes no half of a batch
            log.info("no loss of half a batch (%s: %s)", type(error).__name__, error)
            return
        if refusal := mean_refusal(whole, left, right):
            raise JobError(refusal)

    def losses(self, loss: Callable[[Any, Any], Sums], batch: Any) -> list[Any]:
        """Return weight, total and metrics of a batch by `loss`, without a gradient and without
        compilation: of an evaluation each shape of a batch would be compiled once more.
        """
        form, leaves = flatten(batch)
        framework.set_context(mode=framework.PYNATIVE_MODE)
        try:
            _, (total, weight, metrics) = self._objective(loss, form)(*leaves)
        finally:
            if self._mode == "graph":
                framework.set_context(mode=framework.GRAPH_MODE)
        return [weight, total, *metrics]

    def _objective(self, loss: Callable[[Any, Any], Sums], form: Any) -> Callable[..., Any]:
        model, names, batch_of = self._model, self._names, batch_maker(form)

        def forward(*leaves: Tensor) -> Any:
            total, weight, metrics = loss(model, batch_of(leaves))
            figures: Any = ()
            for name in names:
                figures = (*figures, metrics[name])
            return total, weight, figures

        return self.precision.objective(forward)

    def _gradients(self, loss: Callable[[Any, Any], Sums], form: Any) -> Callable[..., Any]:
        objective = self._objective(loss, form)
        return framework.value_and_grad(objective, None, self.parameters, has_aux=True)

    def _micro_step(self, gradients: Callable[..., Any]) -> Callable[..., Any]:
        sums = self.sums

        def micro_step(*leaves: Tensor) -> Tensor:
            (_, (total, weight, metrics)), parts = gradients(*leaves)
            for gradient_sum, part in zip(sums, parts):  # noqa: B905  # no strict in graphs
                ops.assign_add(gradient_sum, part)
            figures: Any = ()
            # Halves hold no weight above 256 or 2048 exactly.
            kind = ms.float64 if total.dtype == ms.float64 else ms.float32
            zero: Any = ops.zeros_like(total.reshape(()).astype(kind))
            for figure in (weight, total, *metrics):
                if isinstance(figure, Tensor):
                    figures = (*figures, figure.astype(kind).reshape(()))
                else:
                    figures = (*figures, zero + figure)
            # One output: each further one costs a graph's call about as much as the call itself.
            return ops.stack(figures)

        return micro_step

    def _differing(self, computed: Sequence[Any], wanted: Sequence[Any]) -> str | None:
        """Return the first parameter of which two gradients differ by more than rounding."""
        tolerance = self.precision.tolerance
        sizes = [float(np.abs(y).max(initial=0.0)) for y in wanted]
        # Some gradients are 0 but for rounding, as that of attention's k.bias.
        least = max(1e-12, tolerance * max(filter(math.isfinite, sizes), default=0.0))
        for parameter, x, y, size in zip(self.parameters, computed, wanted, sizes, strict=True):
            if not (np.isfinite(x).all() and np.isfinite(y).all()):
                continue  # the boundary's to judge
            if float(np.abs(x - y).max(initial=0.0)) > tolerance * max(size, least):
                return str(parameter.name)
        return None

    def _reference_gradient(self, form: Any, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the gradient of a micro-batch without compilation, waited for."""
        reference = self._reference
        assert reference is not None  # noqa: S101  # the callers have looked
        framework.set_context(mode=framework.PYNATIVE_MODE)
        try:
            with kept_statistics(self._model):
                _, parts = self._gradients(reference, form)(*leaves)
                for part in parts:
                    part.asnumpy()
        finally:
            if self._mode == "graph":
                framework.set_context(mode=framework.GRAPH_MODE)
        return parts

    def plain_step_s(self) -> float:
        """Return the seconds for forward and backward of the first micro-batch without compilation,
        once; 0 if unknown. Sums and statistics are left alone.
        """
        if self._sample is None:
            return 0.0
        sample, self._sample = self._sample, None
        taken: list[float] = []
        for _ in range(3):
            began = time.perf_counter()
            self._reference_gradient(*sample)
            taken.append(time.perf_counter() - began)
        return min(taken)

    # ------------------------------------------------------------------ the boundary

    def reduce(self, trailer: Sequence[float] = ()) -> tuple[Sequence[Tensor], list[float]]:
        """Return gradients and trailer, summed over ranks. Collective: one a bucket.

        A lone rank has nothing to pack: its gradients are the sums themselves.
        """
        if self._group.size == 1:
            return self.sums, list(trailer)
        extra = [Tensor(np.asarray(trailer), self.dtype)] if len(trailer) else []
        whole = self._pack(*extra)
        starts = range(0, self._whole, self._width)
        # Named anew each time, so that only two copies of the gradients exist at once.
        whole = [whole[start : start + self._width] for start in starts]
        whole = self._group.sums(whole)
        whole = ops.concat(whole) if len(whole) > 1 else whole[0]
        return self._unpack(whole), whole[self._numbers :].asnumpy().tolist()

    def norm_of(self, gradients: Sequence[Tensor]) -> float:
        """Return the 2-norm of all gradients; on a CPU by NumPy, which is ten times as fast there
        as MindSpore's own sums.
        """
        squares = 0.0
        for gradient in gradients:
            if self._group.transport == "mccl":
                flat = gradient.asnumpy().reshape(-1)
                # Blocks in their own type, which are added up in float64.
                blocks = (flat[start : start + BLOCK] for start in range(0, flat.size, BLOCK))
                squares += math.fsum(float(np.dot(block, block)) for block in blocks)
            else:
                squares += float(ops.square(gradient).sum().asnumpy())
        norm = math.sqrt(squares)
        if math.isfinite(norm):
            return norm
        # The squares may have overflowed where the numbers did not: scale by the largest.
        arrays = [gradient.asnumpy().astype(np.float64) for gradient in gradients]
        largest = max(float(np.abs(array).max(initial=0.0)) for array in arrays)
        if not math.isfinite(largest):
            return largest
        return largest * math.sqrt(math.fsum(float(np.square(a / largest).sum()) for a in arrays))

    def not_finite(self, gradients: Sequence[Tensor]) -> list[str]:
        """Return the names of parameters whose gradient is not finite."""
        pairs = zip(self.parameters, gradients, strict=True)
        return [
            str(parameter.name)
            for parameter, part in pairs
            if not np.isfinite(part.asnumpy()).all()
        ]

    def step_with(self, optimizer: Any) -> Compiled:
        """Return a compiled function (factor, *gradients) that averages and clips the gradients,
        and calls the optimizer with them, in its order.
        """
        order = tuple(gradient_order(optimizer, self.parameters))

        def step(factor: Tensor, *gradients: Tensor) -> Any:
            averaged: Any = ()
            for place in order:
                averaged = (*averaged, gradients[place] * factor)
            return optimizer(averaged)

        return self.compile(step, "the optimizer's step")


def flatten(batch: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """Return a batch's form, and its tensors: graphs take tensors as inputs, and structures as
    constants.
    """
    if isinstance(batch, Tensor):
        return ("tensor",), (batch,)
    if isinstance(batch, tuple | list) and all(isinstance(leaf, Tensor) for leaf in batch):
        return ("tuple", len(batch)), tuple(batch)
    if isinstance(batch, Mapping) and all(isinstance(leaf, Tensor) for leaf in batch.values()):
        return ("mapping", *batch), tuple(batch.values())
    problem, items = f"is {type(batch).__name__}", ()
    if isinstance(batch, tuple | list | Mapping):
        items = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    for key, leaf in items:
        if not isinstance(leaf, Tensor):
            problem = f"has a {type(leaf).__name__} at {key!r}"
            break
    raise JobError(f"a batch must be a tensor, or a tuple or dictionary of tensors, but {problem}")


def batch_maker(form: Any) -> Callable[[Any], Any]:
    """Return the function that gives a batch of this form of its tensors. Works in a graph."""
    kind, keys = form[0], form[1:]

    def batch_of(leaves: Any) -> Any:
        if kind == "tensor":
            return leaves[0]
        if kind == "tuple":
            return leaves
        return {key: leaf for key, leaf in zip(keys, leaves)}  # noqa: B905, C416  # graphs have no strict, and no dict(zip())

    return batch_of
