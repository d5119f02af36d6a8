"""Optimizers from the configuration, and their learning rates."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

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
    """Return `optimizer`, or raise `ConfigError` if it cannot step on accumulated gradients."""
    values: Any = optimizer.values() if isinstance(optimizer, Mapping) else ()
    values = optimizer if isinstance(optimizer, (list, tuple)) else values
    if several := sum(isinstance(value, Optimizer) for value in values):
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

    def of_first_group(self) -> float:
        """Return its rate; 0 if it has none, or keeps it on a device, where a look would wait."""
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
