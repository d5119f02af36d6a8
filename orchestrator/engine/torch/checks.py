"""Checks that a rank makes alone: arguments, models, optimizers, losses, samples.

What has to be the same on all ranks is checked in `consistency_checks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from orchestrator.engine.api import AccumulationOptions
from orchestrator.engine.common.job_checks import check_loss
from orchestrator.engine.common.trailer import MOST_RANKS
from orchestrator.engine.torch.buffers import HALVES, is_sharded
from orchestrator.engine.torch.group import BaseGroup
from orchestrator.errors import ConfigError, JobError
from orchestrator.job import Loss
from orchestrator.rundir.warnings import warn
from orchestrator.units import first_few


def check_group(group: Any, name: str) -> BaseGroup:
    """Return the group of an argument of this name. Raises `ConfigError` for anything else."""
    if not isinstance(group, BaseGroup):
        raise ConfigError(
            f"{name} must be a TorchGroup: TorchGroup.wrap(torch.distributed.group.WORLD) after "
            "init_process_group(), or TorchGroup.alone() for one process; but it is "
            f"{_describe(group)}"
        )
    if group.size > MOST_RANKS:
        raise ConfigError(f"sums stay exact up to {MOST_RANKS} ranks, but there are {group.size}")
    return group


def check_arguments(model: Any, group: Any, options: AccumulationOptions) -> list[Any] | Module:
    """Return the model; parameters become a list. Raises `ConfigError` for anything else."""
    check_group(group, "group")
    if isinstance(options.metric_names, str):
        raise ConfigError(
            f"metric_names must be a list of names, as in [{options.metric_names!r}], but is the "
            f"text {options.metric_names!r}"
        )
    clip_norm = options.clip_norm
    if clip_norm is not None and not (_is_number(clip_norm) and clip_norm > 0):
        raise ConfigError(f"clip_norm must be a number above 0, but is {clip_norm!r}")
    if isinstance(model, Module):
        return model
    expected = "model must be a torch.nn.Module, or its parameters (with or without names)"
    # Both can be iterated over, and would give letters and names.
    if isinstance(model, (str, Mapping)) or not isinstance(model, Iterable):
        raise ConfigError(f"{expected}; but it is {_describe(model)}")
    items: list[Any] = list(cast("Iterable[Any]", model))
    for item in items:
        pair: Any = item
        named = isinstance(item, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor)
        if not (named or isinstance(item, Tensor)):
            raise ConfigError(f"{expected}; but it holds {_describe(item)}")
    return items


def finite_float(name: str, value: Any, *, least: str = "0 or more") -> float:
    """Return `value` as a finite float.

    Args:
        least: "0 or more", or "above 0".

    Raises:
        ValueError: it is something else.
    """
    if _is_number(value) and 0 <= float(value) < float("inf") and (value or least != "above 0"):
        return float(value)
    raise ValueError(f"`{name}` must be {least}, but is {value!r}")


def _is_number(value: Any) -> bool:
    plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    # bool is a Real to Python, but `clip_norm=True` is a mistake.
    return False if isinstance(plain, bool) else isinstance(plain, Real)


def _describe(value: Any) -> str:
    if value is None or isinstance(value, (int, float, str)):
        return repr(value)
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


# ------------------------------------------------------------------ Models and optimizers


_REDUCES_ITSELF = {  # by the names of torch's classes: to import them would take a second
    "DistributedDataParallel": "give the accumulator the module within, model.module, and call "
    "that one in your loop",
    "FullyShardedDataParallel": "shard it with fully_shard, the second version of FSDP",
}


def check_supported(
    model: Module | list[Any], optimizer: Optimizer
) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
    """Return all named parameters of `model`, and the trained ones, each once.

    Raises:
        JobError: there is nothing to train.
        ConfigError: a wrapper or a parameter that cannot be served, or the optimizer is another
            model's.
    """
    if isinstance(model, Module):
        named = list(model.named_parameters())
        for name, layer in model.named_modules():
            # A subclass of the wrapper reduces by itself, too.
            for kind in type(layer).__mro__:
                if kind.__name__ in _REDUCES_ITSELF and kind.__module__.startswith("torch."):
                    where = f"layer {name}" if name else "the model"
                    raise ConfigError(
                        f"{where} is wrapped in {kind.__name__}, which reduces gradients by itself "
                        f"in every backward: {_REDUCES_ITSELF[kind.__name__]}"
                    )
    else:
        named = [
            (f"parameter {number}", item) if isinstance(item, Tensor) else item
            for number, item in enumerate(model)
        ]
    # Shared parameters count once, under their first name.
    parameters_by_id: dict[int, tuple[str, Tensor]] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            parameters_by_id.setdefault(id(parameter), (name, parameter))
    if not parameters_by_id:
        raise JobError("the model has no parameter to train: none has requires_grad=True")
    parameters = list(parameters_by_id.values())
    by_fsdp = isinstance(model, Module) and is_fully_sharded(model)
    for name, parameter in parameters:
        if reason := _unsupported_reason(parameter, by_fsdp=by_fsdp):
            raise ConfigError(f"parameter {name} {reason}")
    kind = type(optimizer).__name__
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # By identity: equal numbers may well be another model's.
    for parameter in stepped:
        if parameter.requires_grad and id(parameter) not in parameters_by_id:
            raise ConfigError(
                f"the {kind} has a parameter of shape {tuple(parameter.shape)} that the "
                "accumulator does not train, so its gradient would not be reduced: is it of "
                "another model, or of this one before it was copied or moved? Build the "
                "optimizer from the parameters that the accumulator is given"
            )
    stepped_ids = set(map(id, stepped))
    lacking = [name for known, (name, _) in parameters_by_id.items() if known not in stepped_ids]
    if lacking:
        raise ConfigError(
            f"the {kind} lacks {first_few(lacking, 1)}, which no step would change: add it to the "
            "optimizer, or freeze it with requires_grad_(False) before the accumulator is built"
        )
    return named, parameters


def check_filled(model: Module, *, sharded: bool) -> None:
    """Raise `ConfigError` for a tensor of a job's model that has no numbers yet.

    Args:
        sharded: the model is sharded first, which may give it memory.
    """
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            reason = _unfilled_reason(tensor)
            if reason and not (sharded and reason is _ON_META):
                raise ConfigError(f"{kind} {name} {reason}")


_ON_META = "is on the meta device, without numbers: give the model memory before (to_empty)"


def _unfilled_reason(tensor: Tensor) -> str | None:
    if is_lazy(tensor):
        return "has no shape yet, as it is a lazy layer's: call the model once before"
    return _ON_META if tensor.device.type == "meta" else None


def is_fully_sharded(model: Module) -> bool:
    """Return whether `fully_shard` was called on a part of the model."""
    return any(
        kind.__name__ == "FSDPModule" for layer in model.modules() for kind in type(layer).__mro__
    )


def _unsupported_reason(parameter: Any, *, by_fsdp: bool) -> str | None:
    if reason := _unfilled_reason(parameter):
        return reason
    if is_sharded(parameter):
        unsharded = (
            "is a DTensor that no fully_shard() made: give it the plain model, with "
            "shard_optimizer=True say, or one that fully_shard() has sharded"
        )
        return None if by_fsdp else unsharded
    # One that dispatches by itself may keep its numbers elsewhere, as quantized weights do.
    plain: Any = torch.nn.Parameter
    if type(parameter).__torch_dispatch__ is not plain.__torch_dispatch__:
        kind = type(parameter).__name__
        return f"is a {kind}, not a plain tensor: its gradient cannot be laid in flat buffers"
    if parameter.dtype in HALVES and not hasattr(parameter, "grad_dtype"):
        return (
            f"is {parameter.dtype}, whose gradients add up in float32, which torch "
            f"{torch.__version__} cannot do: use torch 2.13, or float32 parameters with "
            "train.precision=bfloat16"
        )
    if parameter.layout is not torch.strided:
        return f"is stored as {parameter.layout}; parameters have to be dense"
    if not parameter.is_leaf:
        return "was computed from other tensors: give the accumulator what it was computed from"
    return None


# ------------------------------------------------------------------ Losses
# `Loss` takes sums, and a mean is the commonest mistake: `cross_entropy` returns one by default.
# The last operations of the loss's graph reveal it, for the price of reading a name or two. They
# are a guess: of a job class `sum_probe` knows better.


_ONLY_PASS = ("ToCopy", "Clone", "View", "Squeeze", "Unsqueeze", "Alias", "ReshapeAlias", "Div")
_SUMS = ("Add", "Sub")


def averaged_by(node: Any, depth: int = 8) -> list[str]:
    """Return the operations that made a tensor a sum of means; [] if it is none, or unknown.

    A mean that was multiplied afterwards is ignored: it may be a sum again. So is one over a single
    number, which is that number.

    >>> x = torch.ones(4, requires_grad=True)
    >>> [averaged_by(y.grad_fn) for y in (x.mean() / 2 + x.mean(), x.mean() * 4, x.sum())]
    [['mean()', 'mean()'], [], []]
    """
    if node is None or not depth:
        return []
    name = node.name().partition("Backward")[0]
    if name == "Mean":
        return ["mean()"] if getattr(node, "_saved_self_sym_numel", None) != 1 else []
    if getattr(node, "_saved_reduction", None) == 1:  # as torch.nn.functional numbers a mean
        target: Tensor | None = getattr(node, "_saved_target", None)
        return [] if target is not None and target.numel() == 1 else [f"{name}(reduction='mean')"]
    if name in _ONLY_PASS or name in _SUMS:
        parts = [part for part, _ in node.next_functions if part is not None]
        if parts and (name in _SUMS or len(parts) == 1):
            means_of_parts = [averaged_by(part, depth - 1) for part in parts]
            return (
                [made_by for means in means_of_parts for made_by in means]
                if all(means_of_parts)
                else []
            )
    return []


def mean_refusal(loss: Loss, samples: int | None = None) -> str:
    """Return why a loss looks like a mean that would be divided once more; "" if it does not.

    Not as many means as the weight says that there are samples: these may be the samples' own. With
    a weight of 1 it may be a mean over one sample's numbers; it is warned of where `samples`, those
    of the micro-batch, are known to be more.
    """
    total: Any = loss.total
    means = averaged_by(total.grad_fn)
    weight = float(loss.weight) if means else 0.0  # waits for the device, so only if need be
    if means and weight == 1.0 and samples is not None and samples > 1:
        warn(
            f"Loss.total is a mean, made by {means[0]}, and Loss.weight is 1 for a micro-batch of "
            "several samples: micro-batches of all sizes count alike, so updates depend on how a "
            "batch is split. Give the sum, with reduction='sum', and the number of samples or "
            "tokens as the weight",
            kind="a mean with a weight of 1",
        )
    if not means or weight in (1.0, float(len(means))):
        return ""
    return (
        f"Loss.total is a mean, made by {means[0]}, and Loss.weight is {weight:g}: "
        "it would be divided twice. Give the sum, with reduction='sum', or multiply the mean "
        "by what it was divided by"
    )


def checked_loss(loss: Loss, names: Sequence[str]) -> list[Any]:
    """Return the `loss_numbers` of a loss that has a graph.

    Raises:
        JobError: `loss` breaks the contract of `Loss`.
    """
    numbers = loss_numbers(loss, names)
    if not loss.total.requires_grad:
        raise JobError(
            "Loss.total has no graph to back-propagate; was it detached, or computed without grad?"
        )
    return numbers


def loss_numbers(loss: Loss, names: Sequence[str]) -> list[Any]:
    """Return weight, total and the metrics of these names, without graphs and not waited for. They
    are copies: until they are read the caller may change its own in place, as a running sum.

    Raises:
        JobError: `loss` breaks the contract of `Loss`, but for a graph.
    """
    check_loss(loss, names, Tensor)
    numbers: list[Any] = [loss.weight, loss.total, *map(loss.metrics.get, names)]
    return [n.detach().clone() if isinstance(n, Tensor) else n for n in numbers]
