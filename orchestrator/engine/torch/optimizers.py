"""Optimizers from the configuration, learning rates, and the one optimizer step of an update."""

from __future__ import annotations

import importlib
import inspect
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from orchestrator.engine.api import AccumulationOptions
from orchestrator.engine.common.packed_sums import LossSums, Trailer
from orchestrator.engine.common.update_policy import UpdatePolicy
from orchestrator.engine.torch.buffers import GradientBuffers, UsedParameters
from orchestrator.engine.torch.group import BaseGroup, gather_numbers
from orchestrator.engine.torch.model import Precision
from orchestrator.engine.torch.reducer import GradientNorm
from orchestrator.engine.torch.sharding import OptimizerShard
from orchestrator.errors import ConfigError, JobError, did_you_mean

BY_NAME: dict[str, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
_WAYS = ("foreach", "fused", "capturable", "differentiable")


def build_optimizer(model: Module, settings: Mapping[str, Any]) -> Optimizer:
    """Return the optimizer that the configuration's `optimizer` describes, over trained parameters.

    Args:
        model: whose parameters are trained where they require gradients.
        settings: `{"name": "sgd" | "adam" | "adamw", ...}` or `{"_target_": "dotted.name", ...}`;
            the other keys are the constructor's. Without the learning rate, which is the
            schedule's. By name they are fused where torch can, unless `foreach`, `fused`,
            `capturable` or `differentiable` is given.

    Raises:
        ConfigError: an unknown name or key, with the nearest one, or values that are refused.
    """
    given = {key: value for key, value in settings.items() if key not in ("name", "_target_")}
    if "_target_" in settings:
        spelled = f"optimizer._target_={settings['_target_']}"
        make = _imported(str(settings["_target_"]))
    else:
        name = str(settings.get("name"))
        spelled = f"optimizer.name={name}"
        if name not in BY_NAME:
            raise ConfigError(f"there is no {spelled}{did_you_mean(name, BY_NAME)}")
        make = BY_NAME[name]
    if "lr" in given:
        raise ConfigError(
            f"optimizer.lr={given['lr']} is not used: the rate is the schedule's; "
            f"set schedule.base_lr={given['lr']}"
        )
    _check_keys(make, given, spelled)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if "_target_" not in settings and given.keys().isdisjoint(_WAYS) and _can_fuse(parameters):
        given["fused"] = True
    try:
        built = make(parameters, lr=1.0, **given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{spelled} with {given} cannot be built: {error}") from error
    return check_optimizer(built, spelled)


def _can_fuse(parameters: Sequence[Tensor]) -> bool:
    """Return whether torch has one kernel for the whole step, several times as fast as its
    default.
    """
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)


def check_optimizer(optimizer: Any, spelled: str) -> Optimizer:
    """`optimizer`, if it can step on accumulated dense gradients, or else `ConfigError`."""
    several = _several(optimizer)
    if several:
        raise ConfigError(
            f"{spelled} gives {several} optimizers, and an accumulator has one, which steps "
            "at its boundary. Where there are several, each with its loss (generator and "
            "discriminator, say), write a loop of your own with an accumulator for each: "
            "docs/how-to/library.md, 'Several optimizers'"
        )
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"{spelled} gives a {type(optimizer).__name__}, not a torch Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(f"{spelled} needs a closure, which accumulated gradients do not have")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError(f"{spelled} takes sparse gradients only; here they are dense: use adam")
    return optimizer


def _several(given: Any) -> int:
    """Return how many optimizers are in a mapping or a list."""
    values: list[Any] = list(given.values()) if isinstance(given, Mapping) else []
    if isinstance(given, (list, tuple)):
        values = list(given)
    return sum(isinstance(value, Optimizer) for value in values)


def _imported(dotted: str) -> Callable[..., Any]:
    module_name, _, name = dotted.rpartition(".")
    try:
        module = importlib.import_module(module_name) if module_name else None
    except ModuleNotFoundError as error:
        raise ConfigError(f"optimizer._target_={dotted}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        known = [n for n in dir(module) if not n.startswith("_")] if module else []
        raise ConfigError(
            f"optimizer._target_={dotted}: there is no '{name}' in {module_name or 'a module'}"
            f"{did_you_mean(name, known)}"
        )
    return found


def _check_keys(make: Callable[..., Any], given: Mapping[str, Any], spelled: str) -> None:
    try:
        parameters = inspect.signature(make).parameters.values()
    except ValueError:  # of a builtin; what it does not take, it says when it is called
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL][1:]
    for key in given:
        if key not in known:
            raise ConfigError(
                f"{spelled} takes no '{key}'"
                f"{did_you_mean(key, [k for k in known if k not in ('params', 'lr')])}"
            )


class LearningRate:
    """Learning rate of an optimizer. Every parameter group keeps its ratio to the base rate.

    The base is the rate in the optimizer's defaults, so `AdamW([{"params": a, "lr": 1e-4},
    {"params": b}], lr=1e-3)` trains `a` at a tenth of the schedule's rate.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        base = float(optimizer.defaults.get("lr") or 0.0)
        self._ratios = [float(group["lr"]) / base for group in optimizer.param_groups if base]

    @property
    def of_first_group(self) -> float:
        """Its rate now; 0 where it has none, or keeps it on a device, where a look would wait."""
        rate = self._optimizer.param_groups[0].get("lr", 0.0)
        return 0.0 if isinstance(rate, Tensor) else float(rate)

    def set(self, rate: float) -> None:
        """Use `rate` from the next step on.

        Raises:
            JobError: the optimizer was built with a base rate of 0, or without one.
        """
        if not self._ratios:
            raise JobError(
                f"{type(self._optimizer).__name__} was built without a learning rate to compare "
                "its parameter groups with; give it lr=1.0"
            )
        for group, ratio in zip(self._optimizer.param_groups, self._ratios, strict=True):
            if isinstance(group["lr"], Tensor):  # compiled and captured steps read it from there
                group["lr"].fill_(rate * ratio)
            else:
                group["lr"] = rate * ratio


def hyperparameters_of(optimizer: Optimizer) -> Callable[[], dict[tuple[int, str], Any]]:
    """Return a function that gives an optimizer's hyperparameters as they are then, as plain
    values.
    """

    def read() -> dict[tuple[int, str], Any]:
        return {
            (number, str(name)): value.tolist() if isinstance(value, Tensor) else value
            for number, group in enumerate(optimizer.param_groups)
            for name, value in group.items()
            if name != "params"
        }

    return read


# ------------------------------------------------------------------ Step


class OptimizerStep:
    """The end of an update: average, clip, and let the optimizer step.

    Args:
        optimizer: steps on the averaged gradient.
        group: the ranks.
        precision: its loss scale is taken out; an overflow halves it.
        used: which parameters had a gradient.
        options: the accumulator's.

    Raises:
        ConfigError: a setting that cannot be used.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: BaseGroup,
        precision: Precision,
        used: UsedParameters,
        options: AccumulationOptions,
    ) -> None:
        self._precision, self._used = precision, used
        self._policy = UpdatePolicy(options, precision, partial(gather_numbers, group))
        self._steps = False  # a step of ours runs
        self._guard = _refuse_other_steps(self, optimizer)

    @property
    def steps(self) -> bool:
        """True if the optimizer may step now."""
        return self._steps

    def close(self) -> None:
        """Leave the optimizer to others."""
        self._guard.remove()

    def prepare(
        self,
        update: int,
        totals: Trailer,
        norm_of_sum: GradientNorm,
        summed: GradientBuffers | OptimizerShard,
        sums: LossSums,
        *,
        divided_by: float,
    ) -> tuple[float | None, bool]:
        """Average and clip, unless something is not finite. Gives the averaged gradient's norm, and
        whether the optimizer is to step.

        Collective where it refuses, or where the set of used parameters changed.

        Args:
            update: its number, for messages.
            totals: of all ranks.
            norm_of_sum: of the summed gradient.
            summed: the gradient; afterwards the averaged and clipped one.
            sums: where this rank's micro-steps went wrong.
            divided_by: what losses were divided by before their backward.

        Raises:
            NonFiniteError, JobError: see `Accumulator.boundary`.
        """
        if not self._policy.losses_usable(update, totals, sums):
            return None, False
        found = self._policy.factor(
            update, totals.weight.value / divided_by, norm_of_sum.value(), summed.non_finite
        )
        if found is None:
            return None, False
        norm, factor = found
        if factor != 1.0:
            for gradient in summed.gradients:
                gradient.mul_(factor)
        unused = self._used.unused(totals)
        if len(unused) == self._used.count:
            raise JobError(
                f"no gradient reached any parameter in update {update}, on any rank: were the "
                "losses computed by another model, or by a copy of this one?"
            )
        summed.detach(unused)
        return norm, True

    @contextmanager
    def stepping(self, summed: GradientBuffers | OptimizerShard) -> Generator[None]:
        """Let the optimizer step on what was prepared."""
        self._steps = True
        try:
            yield
        finally:
            self._steps = False
        summed.attach()
        self._precision.succeeded()


def _refuse_other_steps(step: OptimizerStep, optimizer: Optimizer) -> Any:
    """Have `optimizer` refuse to be stepped by others as long as `step` lives; gives the handle."""
    itself = weakref.ref(step)

    def before(*_: Any) -> None:
        living = itself()
        if living is not None and not living.steps:
            raise JobError(
                "optimizer.step() was called, but the optimizer steps at the boundary: call "
                "accumulator.boundary() instead, which reduces, divides, clips and steps once"
            )

    return optimizer.register_step_pre_hook(before)
