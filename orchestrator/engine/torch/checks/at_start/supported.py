"""Which models and optimizers an accumulator can serve. The rest is refused as it is built."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from orchestrator.engine.torch.gradients.layout import named_parameters, trained
from orchestrator.errors import ConfigError

_PLAIN: Any = torch.nn.Parameter.__torch_dispatch__  # pyright: ignore[reportAttributeAccessIssue]
_REDUCES_ITSELF = {
    "DistributedDataParallel": "give the accumulator the module within, model.module, and call "
    "that one in your loop",
    "FullyShardedDataParallel": "give it the plain model; shard_optimizer=True shards the "
    "optimizer's state",
    "FSDPModule": "give it the plain model; shard_optimizer=True shards the optimizer's state",
}
"""Wrappers of torch, by the names of their classes: to import them would take a second."""


def served(
    model: Module | Iterable[tuple[str, Tensor]] | Iterable[Tensor], optimizer: Optimizer
) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
    """All named parameters of `model`, and the trained ones, each once.

    Raises:
        JobError: there is nothing to train.
        ConfigError: a wrapper or a parameter that cannot be served, or the optimizer is another
            model's.
    """
    _check_model(model)
    named = named_parameters(model)
    parameters = trained(named)
    _check_parameters(parameters)
    _check_optimizer(optimizer, parameters)
    return named, parameters


def _check_model(model: Any) -> None:
    """Refuse a model whose wrapper reduces gradients by itself."""
    if not isinstance(model, Module):
        return
    for name, layer in model.named_modules():
        for kind in type(layer).__mro__:
            if kind.__name__ in _REDUCES_ITSELF and kind.__module__.startswith("torch."):
                where = f"layer {name}" if name else "the model"
                raise ConfigError(
                    f"{where} is wrapped in {kind.__name__}, which reduces gradients by itself in "
                    f"every backward: {_REDUCES_ITSELF[kind.__name__]}"
                )


def _check_parameters(parameters: Sequence[tuple[str, Tensor]]) -> None:
    """Refuse a trained parameter that has no plain gradient."""
    for name, parameter in parameters:
        found = _odd(parameter)
        if found:
            raise ConfigError(f"parameter {name} {found}")


def _odd(parameter: Any) -> str | None:
    kind = type(parameter)
    kinds = [one.__name__ for one in kind.__mro__]
    oddities = (
        (
            "DTensor" in kinds,
            f"is a DTensor, whose gradient is reduced by itself: {_REDUCES_ITSELF['FSDPModule']}",
        ),
        (
            isinstance(parameter, UninitializedParameter),
            "has no shape yet, as it is a lazy layer's: call the model once before",
        ),
        (
            kind.__torch_dispatch__ is not _PLAIN,
            f"is a {kinds[0]}, not a plain tensor: its gradient cannot be laid in flat buffers",
        ),
        (
            parameter.device.type == "meta",
            "is on the meta device, without numbers: give the model memory before (to_empty)",
        ),
        (
            parameter.layout is not torch.strided,
            f"is stored as {parameter.layout}; parameters have to be dense",
        ),
        (
            not parameter.is_leaf,
            "was computed from other tensors: give the accumulator what it was computed from",
        ),
    )
    return next((words for is_so, words in oddities if is_so), None)


def _check_optimizer(optimizer: Optimizer, parameters: Sequence[tuple[str, Tensor]]) -> None:
    """Refuse an optimizer that steps others than the trained parameters, or not all of them."""
    kind = type(optimizer).__name__
    ours = {id(parameter) for _, parameter in parameters}
    theirs: set[int] = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            theirs.add(id(parameter))
            if parameter.requires_grad and id(parameter) not in ours:
                raise ConfigError(
                    f"the {kind} has a parameter of shape {tuple(parameter.shape)} that the "
                    "accumulator does not train, so its gradient would not be reduced: is it of "
                    "another model, or of this one before it was copied or moved? Build the "
                    "optimizer from the parameters that the accumulator is given"
                )
    lacking = [name for name, parameter in parameters if id(parameter) not in theirs]
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise ConfigError(
            f"the {kind} lacks {lacking[0]}{more}, which no step would change: add it to the "
            "optimizer, or freeze it with requires_grad_(False) before the accumulator is built"
        )
