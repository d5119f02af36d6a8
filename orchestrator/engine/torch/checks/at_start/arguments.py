"""What an accumulator may be handed: kinds of things, told apart before anything is built of them.

Rules of values that go together are with those who need them; here a caller is answered who has
swapped two arguments, or passed a class, a scheduler or torch's own group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, cast

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from orchestrator.engine.common.boundary.packed_sums import MOST_RANKS
from orchestrator.engine.settings import AccumulationOptions
from orchestrator.engine.torch.comm.base_group import BaseGroup
from orchestrator.errors import ConfigError

_GROUP = (
    "group must be a TorchGroup: TorchGroup.wrap(torch.distributed.group.WORLD) after "
    "init_process_group(), or TorchGroup.alone() for one process"
)
_MODEL = "model must be a torch.nn.Module, or its parameters (with or without names)"


def check_arguments(model: Any, group: Any, options: AccumulationOptions) -> list[Any] | Module:
    """The model, an iterable of parameters as a list; or `ConfigError` for what is none.

    Args:
        model, group, options: see `Accumulator`.
    """
    if not isinstance(group, BaseGroup):
        raise ConfigError(f"{_GROUP}; but it is {_words(group)}")
    if group.size > MOST_RANKS:
        raise ConfigError(f"sums stay exact up to {MOST_RANKS} ranks, but there are {group.size}")
    if isinstance(options.metric_names, str):
        raise ConfigError(
            f"metric_names must be a list of names, as in [{options.metric_names!r}], but is the "
            f"text {options.metric_names!r}"
        )
    if options.clip_norm is not None:
        _check_above_zero("clip_norm", options.clip_norm)
    return _checked_model(model)


def number(name: str, value: Any, *, least: str = "0 or more") -> float:
    """`value` as a finite float.

    Args:
        name: the argument's.
        value: the number, or a tensor of one.
        least: "0 or more", or "above 0".

    Raises:
        ValueError: it is something else.
    """
    if _is_number(value) and 0 <= float(value) < float("inf") and (value or least != "above 0"):
        return float(value)
    raise ValueError(f"`{name}` must be {least}, but is {value!r}")


def _check_above_zero(name: str, value: Any) -> None:
    if not (_is_number(value) and value > 0):
        raise ConfigError(f"{name} must be a number above 0, but is {value!r}")


def _is_number(value: Any) -> bool:
    plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    return False if isinstance(plain, bool) else isinstance(plain, Real)


def _checked_model(model: Any) -> list[Any] | Module:
    if isinstance(model, Module):
        return model
    if isinstance(model, Optimizer):
        raise ConfigError(f"{_MODEL}, and comes before the optimizer; but it is {_words(model)}")
    if isinstance(model, (type, str, Mapping)) or not isinstance(model, Iterable):
        raise ConfigError(f"{_MODEL}; but it is {_words(model)}")
    items: list[Any] = list(cast("Iterable[Any]", model))
    for item in items:
        pair: Any = item
        named = isinstance(item, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor)
        if not (named or isinstance(item, Tensor)):
            raise ConfigError(f"{_MODEL}; but it holds {_words(item)}")
    return items


def _words(value: Any) -> str:
    if value is None or isinstance(value, (int, float, str)):
        return repr(value)
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
