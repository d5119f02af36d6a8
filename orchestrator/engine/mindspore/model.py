"""Models and optimizers of MindSpore jobs: seeds, batch norm, precision, weights digest."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, amp, nn, ops
from mindspore.experimental import optim

from orchestrator.engine.api import EngineSettings
from orchestrator.engine.common.job_checks import (
    name_layers,
    norm_advice,
    norm_groups,
    optimizer_class,
    replaced_norms,
)
from orchestrator.engine.common.learning_rate import LearningRate
from orchestrator.engine.common.replicas import ReplicaChecker, WeightRange
from orchestrator.engine.common.seeds import derived_seed, seed_python_and_numpy
from orchestrator.engine.common.update_policy import LossScale
from orchestrator.engine.mindspore.group import MindSporeGroup
from orchestrator.errors import ConfigError, JobError
from orchestrator.job import Job

BATCH_NORMS: tuple[Any, ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
DROPOUT: Any = (ops.Dropout, ops.Dropout2D, ops.Dropout3D)


def batch_norms(model: nn.Cell) -> dict[str, Any]:
    """Return the model's batch norms by name, "" if it is one itself; without those that are
    frozen.
    """
    return {
        name: cell
        for name, cell in model.cells_and_names()
        if isinstance(cell, BATCH_NORMS)
        and getattr(cell, "use_batch_statistics", None) is not False
    }


def draws(cell: Any) -> bool:
    """Return whether a cell drops elements out at random, by an operator of MindSpore's."""
    rates = (getattr(cell, "p", None), getattr(cell, "dropout", None))
    if 0 in rates or getattr(cell, "keep_prob", None) == 1:
        return False
    calls_function = isinstance(cell, nn.Dropout1d | nn.MultiheadAttention)
    return calls_function or any(isinstance(value, DROPOUT) for value in vars(cell).values())


def draws_advice(what: str) -> str:
    """Return a sentence about the part `what` of a job, which draws random numbers."""
    return (
        f"{what} draws from a state inside MindSpore's operator, which cannot be set: a resumed "
        "run draws other numbers, so it will not have the bits of an undisturbed one. Regularise "
        "by weight decay, or draw masks in the data set"
    )


def advice(model: nn.Cell, *, ranks: int = 2, micro_batches: int | None = None) -> list[str]:
    """Return sentences about layers of `model` that do not do what one big batch would.

    Args:
        ranks: how many train it.
        micro_batches: of an update, over all ranks; None for many.
    """
    sentences: list[str] = []
    norms = batch_norms(model)
    if norms and micro_batches != 1:
        sentences.append(norm_advice(norms, apart=ranks > 1))
    if dropouts := [name for name, cell in model.cells_and_names() if draws(cell)]:
        sentences.append(draws_advice(f"dropout in {name_layers(dropouts)}"))
    return sentences


def with_norms(model: nn.Cell, choice: str) -> tuple[nn.Cell, list[str]]:
    """Return the model with its batch norms frozen, replaced or left; and a sentence about it.

    Args:
        model: is changed in place, unless it is a batch norm itself.
        choice: `engine.norm`: "warn", which leaves it to `advice` to warn; "frozen", "group" or
            "layer".
    """
    norms = batch_norms(model)
    if choice == "warn" or not norms:
        return model, []
    if choice == "frozen":
        for layer in norms.values():
            layer.use_batch_statistics = False
        return model, [replaced_norms(choice, norms)]
    replacements: dict[int, nn.Cell] = {}
    for layer in norms.values():
        channels = int(layer.num_features)
        groups = norm_groups(choice, channels, vectors=isinstance(layer, nn.BatchNorm1d))
        grouped: Any = nn.GroupNorm(groups, channels, eps=layer.eps)
        grouped.gamma, grouped.beta = layer.gamma, layer.beta
        replacements[id(layer)] = grouped
    names = [(parameter, parameter.name) for parameter in model.get_parameters()]
    for _, parent in list(model.cells_and_names()):
        container: Any = parent
        for child, layer in list(parent.name_cells().items()):
            if id(layer) not in replacements:
                continue
            if isinstance(parent, nn.SequentialCell | nn.CellList):
                container[int(child)] = replacements[id(layer)]
            else:
                setattr(container, child, replacements[id(layer)])
    for parameter, name in names:  # containers add their prefix once more
        parameter.name = name
    return replacements.get(id(model), model), [replaced_norms(choice, norms)]


# ------------------------------------------------------------------ Dropout
# On CPUs MindSpore's operator draws from one generator in several threads at once, so that its
# masks do not repeat, and keeps the seed that it was built with, which is the same on all ranks.


@functools.cache
def mask_state() -> Any:
    """Return the state that the masks of dropout are drawn from; each draw moves it on."""
    return Parameter(Tensor(1, ms.uint32), name="mask_state", requires_grad=False)


def seeded_dropout(operator: Any) -> Callable[[Any], Any]:
    """Return a dropout operator's equal that draws from `mask_state`. Works in a graph."""
    keep, state = operator.keep_prob, mask_state()
    channels = {ops.Dropout2D: (1, 1), ops.Dropout3D: (1, 1, 1)}.get(type(operator), ())
    # Constants of MurmurHash3 and the golden ratio; an even step leaves the state odd.
    step, first, second, bits, limit = (
        Tensor(number, ms.uint32)
        for number in (0x9E3779B2, 0x85EBCA6B, 0xC2B2AE35, 16, round(keep * 0xFFFFFFFF))
    )

    def dropout(x: Any) -> Any:
        shape = (*x.shape[:2], *channels) if channels else x.shape
        count = shape[0] * shape[1] if channels else x.size
        numbers: Any = ops.arange(1, count + 1)
        hashed = numbers.astype(ms.uint32) * ops.assign_add(state, step)
        for factor in (first, second):
            hashed = ops.bitwise_xor(hashed, ops.bitwise_right_shift(hashed, bits)) * factor
        mask = (hashed < limit).reshape(shape).astype(x.dtype)
        return x * mask / keep, mask

    return dropout


# ------------------------------------------------------------------ Building


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and MindSpore's generators, and the masks of dropout."""
    ms.set_seed(seed & 0x7FFFFFFF)  # takes 31 bits; it seeds NumPy, too
    seed_python_and_numpy(seed)
    ops.assign(mask_state(), Tensor(seed & 0xFFFFFFFF | 1, ms.uint32))


def build_model(job: Job, settings: EngineSettings) -> tuple[nn.Cell, list[str]]:
    """Return the job's model from the run's seed, and what to know of its norms.

    Raises:
        JobError: `model()` gives none.
    """
    seed_everything(derived_seed("model", settings.seed))
    model = job.model()
    if not isinstance(model, nn.Cell):
        raise JobError(f"model() must give a mindspore.nn.Cell, but gives {type(model).__name__}")
    if settings.precision == "float64":
        for parameter in model.get_parameters():
            if parameter.is_floating_point():
                parameter.set_dtype(ms.float64)
    model, warnings = with_norms(model, settings.norm)
    for _, cell in model.cells_and_names():
        for name, operator in list(vars(cell).items()):
            if isinstance(operator, DROPOUT) and ms.get_context("device_target") == "CPU":
                setattr(cell, name, seeded_dropout(operator))
    model.set_train()
    return model, warnings


@contextmanager
def kept_statistics(model: nn.Cell) -> Generator[None]:
    """Restore parameters that are not trained, such as moving statistics, and dropout's state."""
    others: list[Any] = [mask_state(), *model.untrainable_params()]
    trained = [(parameter, parameter.asnumpy().copy()) for parameter in model.trainable_params()]
    before = [parameter.asnumpy().copy() for parameter in others]
    try:
        yield
    finally:
        for parameter, array in zip(others, before, strict=True):
            ops.assign(parameter, Tensor(array, parameter.dtype))
    for parameter, array in trained:
        if not np.array_equal(parameter.asnumpy(), array, equal_nan=True):
            raise JobError(
                f"loss() changes {parameter.name} between micro-steps: change it in after_update"
            )


@contextmanager
def statistics_of_writer(
    model: nn.Cell, group: MindSporeGroup, gather: Callable[[Sequence[float]], list[list[float]]]
) -> Generator[None]:
    """Within it, all ranks have rank 0's moving statistics and other parameters that are not
    trained; each gets its own back afterwards. Collective, on entry.

    Args:
        gather: every rank's numbers, a row for each rank; collective.
    """
    with kept_statistics(model):
        parameters: list[Any] = list(model.untrainable_params())
        if parameters and group.size > 1:
            digests = [hashlib.sha256(p.asnumpy().tobytes()).hexdigest() for p in parameters]
            rows = gather([float(int(digest[:12], 16)) for digest in digests])  # 48 bits, exact
            for parameter, column in zip(parameters, zip(*rows, strict=True), strict=True):
                if len(set(column)) > 1:
                    numbers = Tensor(parameter.asnumpy())
                    group.broadcast(numbers)
                    ops.assign(parameter, numbers)
        yield


def check_same_weights(sha256: str, gather: Callable[[Sequence[float]], list[list[float]]]) -> None:
    """Check that all ranks start with the same bits. Collective.

    Raises:
        JobError: on all ranks alike, naming those that differ from rank 0.
    """
    rows = gather([float(int(sha256[:12], 16))])  # 48 bits, which a float64 carries exactly
    odd = [rank for rank, row in enumerate(rows) if row != rows[0]]
    if odd:
        raise JobError(
            f"model() does not give the same weights on every rank: ranks "
            f"{', '.join(map(str, odd))} differ from rank 0. It must depend on nothing but the "
            f"job's arguments and the random seed"
        )


# ------------------------------------------------------------------ Precision
# Weights, gradients and sums stay float32; inside the loss, operators of MindSpore's white list
# (matrix products, convolutions) compute in the half format, those of its black list do not.


class Precision(LossScale):
    """Number formats of a run. See `EngineSettings.precision` for the names.

    Attributes:
        tolerance: how far two ways to compute a gradient may differ, relative to its largest part.
    """

    def __init__(self, name: str) -> None:
        super().__init__(scales=name == "float16")
        self._half: Any = {"float16": ms.float16, "bfloat16": ms.bfloat16}.get(name)
        self.tolerance = 1e-3 if self._half is None else 5e-2
        # A parameter, so that graphs read its value and need no compiling when it changes.
        self._scale_parameter: Any = None
        if name == "float16":
            self._scale_parameter = Parameter(
                Tensor(self.scale, ms.float32), name="loss_scale", requires_grad=False
            )

    def objective(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function to differentiate. Works in a graph.

        Args:
            forward: gives (total, ...).

        Returns:
            A function that gives (scaled total, (total, ...)), computed in the format.
        """
        inner: Any = forward
        if self._half is not None:
            inner = amp.auto_mixed_precision(forward, "auto", self._half)
        scale = self._scale_parameter

        def plain(*leaves: Tensor) -> Any:
            outputs = inner(*leaves)
            return outputs[0], outputs

        def scaled(*leaves: Tensor) -> Any:
            outputs = inner(*leaves)
            return outputs[0].astype(ms.float32) * scale, outputs

        return plain if scale is None else scaled

    def begin_window(self) -> None:
        """Let graphs see the scale, which changes between windows."""
        if self._scale_parameter is not None:
            ops.assign(self._scale_parameter, Tensor(self.scale, ms.float32))  # see `_assign_rate`


# ------------------------------------------------------------------ Weights digest


def replica_checker(
    model: nn.Cell, gather: Callable[[Sequence[float]], list[list[float]]], ranks: int
) -> ReplicaChecker:
    """Return the detector of a model's parameters that differ between ranks. Not collective.

    The running statistics of batch norms are parameters here, too, and every rank has its own.
    """
    own = {
        id(statistics)
        for _, cell in model.cells_and_names()
        if isinstance(cell, BATCH_NORMS)
        for statistics in (cell.moving_mean, cell.moving_variance)
    }
    parameters: list[Any] = [p for p in model.get_parameters() if id(p) not in own]

    def digests(pieces: Sequence[WeightRange]) -> list[int]:
        arrays: dict[int, Any] = {}
        numbers: list[int] = []
        for piece in pieces:
            if piece.number not in arrays:
                array = parameters[piece.number].asnumpy()
                arrays = {piece.number: np.ascontiguousarray(array).reshape(-1)}
            data = arrays[piece.number][piece.start : piece.end].view(np.uint8).data
            numbers.append(int.from_bytes(hashlib.sha256(data).digest()[:8], "little"))
        return numbers

    return ReplicaChecker(
        [parameter.name for parameter in parameters],
        [int(parameter.size) for parameter in parameters],
        [int(parameter.itemsize) for parameter in parameters],
        digests=digests,
        gather=gather,
        ranks=ranks,
    )


# ------------------------------------------------------------------ Optimizers
# `mindspore.experimental.optim` is used: its update rules are those of the papers and agree with
# torch's to rounding, while `nn.Adam` places epsilon elsewhere and `nn.AdamWeightDecay` has no bias
# correction.


ANY_RATE = 1e-3
"""To build with; each update replaces it before the first step."""

BY_NAME = {"sgd": optim.SGD, "adam": optim.Adam, "adamw": optim.AdamW}


class WideSGD(nn.Cell):
    """SGD with momentum and L2 weight decay, as `optim.SGD`, whose operator knows no float64."""

    def __init__(
        self,
        params: Sequence[Parameter],
        lr: float = ANY_RATE,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__()
        self.momentum, self.decay, self.nesterov = momentum, weight_decay, nesterov
        self.learning_rate = Parameter(Tensor(lr, ms.float64), name="learning_rate")
        self.parameters: Any = ParameterTuple(params)
        self.velocity: Any = self.parameters.clone("velocity", "zeros")

    def construct(self, gradients: Any) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        for weight, gradient, velocity in zip(self.parameters, gradients, self.velocity):  # noqa: B905  # compiled: no `strict`
            step = gradient + self.decay * weight
            if self.momentum:
                speed = velocity * self.momentum + step
                ops.assign(velocity, speed)
                step = step + self.momentum * speed if self.nesterov else speed
            ops.assign_sub(weight, step * self.learning_rate)
        return True


def build_optimizer(settings: Mapping[str, Any], parameters: Sequence[Parameter]) -> Any:
    """Return the optimizer of `settings`; its learning rate is set at every update.

    Raises `ConfigError` when it does not exist or does not take the settings.
    """
    spelled, maker, rest = optimizer_class(settings, BY_NAME)
    if "betas" in rest:
        rest["betas"] = tuple(rest["betas"])
    if maker is optim.SGD and any(parameter.dtype == ms.float64 for parameter in parameters):
        maker = WideSGD
    known = set(inspect.signature(maker).parameters)
    if isinstance(maker, type) and issubclass(maker, nn.Optimizer):
        known.add("learning_rate")  # a decorator hides their signatures
    for key in known & {"lr", "learning_rate"}:
        rest.setdefault(key, ANY_RATE)
    try:
        return maker(list(parameters), **rest)
    except TypeError as error:
        raise ConfigError(f"{spelled} with {rest} cannot be built: {error}") from error


def gradient_order(optimizer: Any, trained: Sequence[Parameter]) -> list[int]:
    """Return for each parameter of an optimizer, in its order, its place among the trained ones.

    An optimizer applies the gradients that it gets to its parameters one after the other; those of
    parameter groups are seldom in the model's order.

    Raises:
        ConfigError: it lacks a trained parameter, or has another one.
    """
    kind, places = type(optimizer).__name__, {id(weight): n for n, weight in enumerate(trained)}
    stepped = list(optimizer.parameters)
    lacking = {id(weight) for weight in trained} - {id(weight) for weight in stepped}
    for parameter in trained:
        if id(parameter) in lacking:
            raise ConfigError(
                f"the {kind} lacks {parameter.name}, which no step would change: add it to the "
                "optimizer, or set its requires_grad to False in model()"
            )
    for parameter in stepped:
        if id(parameter) not in places:
            raise ConfigError(
                f"the {kind} has parameter {parameter.name}, which the model does not train: build "
                "the optimizer from model.trainable_params()"
            )
    return [places[id(parameter)] for parameter in stepped]


def learning_rate_of(optimizer: Any) -> LearningRate:
    """Return an optimizer's learning rate, to be set.

    Raises:
        JobError: it schedules its rate itself, or divides gradients by a loss scale.
    """
    kind = type(optimizer).__name__
    scale = getattr(optimizer, "loss_scale", 1.0)
    if scale != 1.0:
        raise JobError(
            f"{kind} has loss_scale={scale} and would divide gradients by it, which are not "
            "multiplied by it: the engine takes its own scale out itself; build the optimizer "
            "without loss_scale, and set train.precision=float16"
        )
    groups: Any = getattr(optimizer, "param_groups", None)
    if groups is None:
        rate = getattr(optimizer, "learning_rate", None)
        if not isinstance(rate, Parameter):
            raise JobError(
                f"{kind} schedules its learning rate itself, or has several; here it follows "
                "schedule.*, one clock for all ranks: build it with a plain number (the groups "
                "of mindspore.experimental.optim may have rates of their own)"
            )
        return LearningRate(kind, lambda: [{"lr": rate}], float(rate), _assign_rate)
    base, first = optimizer.defaults.get("lr", 0.0), groups[0]["lr"]
    if isinstance(first, Tensor):
        base = Tensor(base, first.dtype)  # rounded like the groups' own
    return LearningRate(kind, lambda: groups, float(base), _assign_rate)


def _assign_rate(parameter: Parameter, rate: float) -> None:
    """Write a rate by `ops.assign`: functions that were compiled before do not see what
    `assign_value` or `set_data` write, and in PyNative mode the optimizers compile their steps.
    """
    ops.assign(parameter, Tensor(rate, parameter.dtype))


def state_of(optimizer: Any, weights: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Return the optimizer's own parameters by name: moments, counters. The weights are not among
    them.
    """
    taken = {id(parameter) for parameter in weights.values()}
    state = {
        name: parameter
        for name, parameter in optimizer.parameters_dict().items()
        if id(parameter) not in taken
    }
    taken.update(map(id, state.values()))
    # MindSpore's search leaves out Python lists, in which NAdam, ASGD and users hold state.
    for path, cell in optimizer.cells_and_names():
        for attribute, value in vars(cell).items():
            members: Any = enumerate(value if isinstance(value, list | tuple) else ())
            for place, member in members:
                if isinstance(member, Parameter) and id(member) not in taken:
                    state[f"{path}.{attribute}.{place}".lstrip(".")] = member
                    taken.add(id(member))
    return state
