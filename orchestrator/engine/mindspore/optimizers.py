"""Optimizers from the configuration, learning rates, and the one optimizer step of an update.

`mindspore.experimental.optim` is used: its update rules are those of the papers and agree with
torch's to rounding, while `nn.Adam` places epsilon elsewhere and `nn.AdamWeightDecay` has no bias
correction.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.experimental import optim

from orchestrator.engine.mindspore.accumulator import Accumulator, Layout
from orchestrator.errors import ConfigError, JobError, did_you_mean

ANY_RATE = 1e-3
"""To build with; `set_rate` replaces it before the first step."""

BY_NAME = {"sgd": optim.SGD, "adam": optim.Adam, "adamw": optim.AdamW}


class WideSGD(nn.Cell):
    """SGD with momentum and L2 weight decay, as `optim.SGD`, whose operator knows no float64."""

    def __init__(
        self,
        params: Sequence[Parameter],
        lr: float = ANY_RATE,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__()
        self.momentum, self.decay = momentum, weight_decay
        self.learning_rate = Parameter(Tensor(lr, ms.float64), name="learning_rate")
        self.weights: Any = ParameterTuple(params)
        self.velocity: Any = self.weights.clone("velocity", "zeros")

    def construct(self, gradients: Any) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        for weight, gradient, held in zip(self.weights, gradients, self.velocity):  # noqa: B905  # compiled: no `strict`
            step = gradient + self.decay * weight
            if self.momentum:
                step = held * self.momentum + step
                ops.assign(held, step)
            ops.assign_sub(weight, step * self.learning_rate)
        return True


def build_optimizer(settings: Mapping[str, Any], parameters: Sequence[Parameter]) -> Any:
    """Return the optimizer of `settings`; its learning rate is set at every update (see
    `set_rate`).

    Raises `ConfigError` when it does not exist or does not take the settings.
    """
    rest = {k: v for k, v in settings.items() if k not in ("name", "_target_")}
    if "betas" in rest:
        rest["betas"] = tuple(rest["betas"])
    if "_target_" in settings:
        name = str(settings["_target_"])
        module, _, attribute = name.rpartition(".")
        try:
            maker: Any = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"optimizer._target_={name}: {error}") from error
    else:
        name = str(settings["name"])
        if name not in BY_NAME:
            raise ConfigError(f"optimizer.name={name} is not known{did_you_mean(name, BY_NAME)}")
        wide = any(parameter.dtype == ms.float64 for parameter in parameters)
        maker = WideSGD if name == "sgd" and wide else BY_NAME[name]
    known = set(inspect.signature(maker).parameters)
    if isinstance(maker, type) and issubclass(maker, nn.Optimizer):
        known.add("learning_rate")  # a decorator hides their signatures
    for key in known & {"lr", "learning_rate"}:
        rest.setdefault(key, ANY_RATE)
    try:
        return maker(list(parameters), **rest)
    except TypeError as error:
        raise ConfigError(f"optimizer {name}: {error}") from error


def set_rate(optimizer: Any, rate: float) -> None:
    """Set the learning rate, of every group of parameters alike.

    By `ops.assign`: what `assign_value` or `set_data` write is not seen by functions that were
    compiled before, and in PyNative mode the optimizers compile their steps themselves.
    """
    groups = getattr(optimizer, "param_groups", None)
    if groups is not None:
        for group in groups:
            if isinstance(group["lr"], Parameter):
                ops.assign(group["lr"], Tensor(rate, group["lr"].dtype))
            else:
                group["lr"] = rate
        return
    own = getattr(optimizer, "learning_rate", None)
    if not isinstance(own, Parameter):
        raise JobError(
            f"{type(optimizer).__name__} schedules its learning rate itself; here it follows "
            f"schedule.*, one clock for all ranks: build it with a plain number"
        )
    ops.assign(own, Tensor(rate, own.dtype))


def hyperparameters_of(optimizer: Any) -> Callable[[], dict[tuple[int, str], Any]]:
    """Return a function that gives an optimizer's hyperparameters as they are then, as plain
    values.

    Of `mindspore.nn`'s optimizers that is the rate alone: all else is compiled into their steps.
    """

    def read() -> dict[tuple[int, str], Any]:
        groups = getattr(optimizer, "param_groups", None)
        if groups is None:
            return {(0, "lr"): _plain(getattr(optimizer, "learning_rate", None))}
        return {
            (number, str(name)): _plain(value)
            for number, group in enumerate(groups)
            for name, value in group.items()
            if name != "params"
        }

    return read


def _plain(value: Any) -> Any:
    return value.asnumpy().tolist() if isinstance(value, Tensor) else value


def state_of(optimizer: Any, weights: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Return the optimizer's own parameters by name: moments, counters. The weights are not among
    them.
    """
    taken = {id(parameter) for parameter in weights.values()}
    return {
        name: parameter
        for name, parameter in optimizer.parameters_dict().items()
        if id(parameter) not in taken
    }


# ------------------------------------------------------------------ Step


def stepping(accumulator: Accumulator, optimizer: Any) -> Callable[..., Any]:
    """Return a function (factor, *buckets) that averages and clips the gradients in the buckets of
    `accumulator`, and calls the optimizer with them. For compilation.
    """
    alone, layout = accumulator.alone, accumulator.layout
    sums, shapes = accumulator.sums, accumulator.shapes

    def step(factor: Tensor, *buckets: Tensor) -> Any:
        averaged: Any = ()
        for gradient in sums if alone else unpack(layout, shapes, buckets):
            averaged = (*averaged, gradient * factor)
        return optimizer(averaged)

    return step


def unpack(
    layout: Layout, shapes: Sequence[tuple[int, ...]], buckets: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return the tensors of these shapes from the buckets that they lie in. Works in a graph."""
    tensors: Any = ()
    for spans, shape in zip(layout.found, shapes):  # noqa: B905  # no strict in graphs
        parts: Any = ()
        for bucket, start, stop in spans:
            parts = (*parts, buckets[bucket][start:stop])
        flat = ops.concat(parts) if len(parts) > 1 else parts[0]
        tensors = (*tensors, flat.reshape(shape))
    return tensors
