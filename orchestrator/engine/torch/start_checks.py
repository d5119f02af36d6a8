"""Checks when an accumulator is built: arguments, supported models, equal ranks."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from orchestrator.engine.api import AccumulationOptions
from orchestrator.engine.common.boundary import MOST_RANKS
from orchestrator.engine.common.replicas import folded, minority_ranks
from orchestrator.engine.torch.buffers import HALVES, Named, is_sharded, local_part
from orchestrator.engine.torch.group import (
    BaseGroup,
    broadcast_tensors,
    gather_numbers,
    gather_texts,
    ranks_where,
)
from orchestrator.engine.torch.window_checks import tensor_digest
from orchestrator.errors import ConfigError, JobError
from orchestrator.plan.plan_warnings import named_ranks
from orchestrator.units import first_few

_MODEL = "model must be a torch.nn.Module, or its parameters (with or without names)"


def check_arguments(model: Any, group: Any, options: AccumulationOptions) -> list[Any] | Module:
    """Return the model; parameters become a list. Raises `ConfigError` for anything else.

    Args:
        model, group, options: see `Accumulator`.
    """
    if not isinstance(group, BaseGroup):
        raise ConfigError(
            "group must be a TorchGroup: TorchGroup.wrap(torch.distributed.group.WORLD) after "
            "init_process_group(), or TorchGroup.alone() for one process; but it is "
            f"{_describe(group)}"
        )
    if group.size > MOST_RANKS:
        raise ConfigError(f"sums stay exact up to {MOST_RANKS} ranks, but there are {group.size}")
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
    if isinstance(model, Optimizer):
        raise ConfigError(f"{_MODEL}, and comes before the optimizer; but it is {_describe(model)}")
    if isinstance(model, (type, str, Mapping)) or not isinstance(model, Iterable):
        raise ConfigError(f"{_MODEL}; but it is {_describe(model)}")
    items: list[Any] = list(cast("Iterable[Any]", model))
    for item in items:
        pair: Any = item
        named = isinstance(item, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor)
        if not (named or isinstance(item, Tensor)):
            raise ConfigError(f"{_MODEL}; but it holds {_describe(item)}")
    return items


def finite_float(name: str, value: Any, *, least: str = "0 or more") -> float:
    """Return `value` as a finite float.

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


def _is_number(value: Any) -> bool:
    plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    return False if isinstance(plain, bool) else isinstance(plain, Real)


def _describe(value: Any) -> str:
    if value is None or isinstance(value, (int, float, str)):
        return repr(value)
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


# ------------------------------------------------------------------ Models and optimizers


_PLAIN: Any = torch.nn.Parameter.__torch_dispatch__  # pyright: ignore[reportAttributeAccessIssue]
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
    found: dict[int, tuple[str, Tensor]] = {}  # shared ones count once, under their first name
    for name, parameter in named:
        if parameter.requires_grad:
            found.setdefault(id(parameter), (name, parameter))
    if not found:
        raise JobError("the model has no parameter to train: none has requires_grad=True")
    parameters = list(found.values())
    by_fsdp = isinstance(model, Module) and is_fully_sharded(model)
    for name, parameter in parameters:
        if reason := _unsupported_reason(parameter, by_fsdp=by_fsdp):
            raise ConfigError(f"parameter {name} {reason}")
    _check_optimizer(optimizer, parameters)
    return named, parameters


def is_fully_sharded(model: Module) -> bool:
    """Return whether `fully_shard` was called on a part of the model."""
    return any(
        kind.__name__ == "FSDPModule" for layer in model.modules() for kind in type(layer).__mro__
    )


def _unsupported_reason(  # noqa: PLR0911  # one for each reason
    parameter: Any, *, by_fsdp: bool
) -> str | None:
    kind = type(parameter)
    if parameter.device.type == "meta":
        return "is on the meta device, without numbers: give the model memory before (to_empty)"
    if is_sharded(parameter):
        unsharded = (
            "is a DTensor that no fully_shard() made: give it the plain model, with "
            "shard_optimizer=True say, or one that fully_shard() has sharded"
        )
        return None if by_fsdp else unsharded
    if isinstance(parameter, UninitializedParameter):
        return "has no shape yet, as it is a lazy layer's: call the model once before"
    if kind.__torch_dispatch__ is not _PLAIN:
        return (
            f"is a {kind.__name__}, not a plain tensor: its gradient cannot be laid in flat buffers"
        )
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


def _check_optimizer(optimizer: Optimizer, parameters: Named) -> None:
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
        raise ConfigError(
            f"the {kind} lacks {first_few(lacking, 1)}, which no step would change: add it to the "
            "optimizer, or freeze it with requires_grad_(False) before the accumulator is built"
        )


# ------------------------------------------------------------------ Equal machines


KERNEL_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "NVIDIA_TF32_OVERRIDE", "NCCL_ALGO",
    "NCCL_PROTO", "NCCL_NVLS_ENABLE",
)  # fmt: skip
"""Variables by which CUDA's libraries choose other kernels, or NCCL another order of sums."""


def versions() -> dict[str, str]:
    """Return the versions of libraries and devices. Equal facts, equal bits."""
    found: dict[str, str] = {
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "matmul": torch.get_float32_matmul_precision(),
    }
    for name in ("cuda", "hip"):
        if version := getattr(torch.version, name):
            found[name] = version
    found.update((name, os.environ[name]) for name in KERNEL_VARIABLES if name in os.environ)
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        found["gpu"] = f"{gpu.name} {gpu.major}.{gpu.minor} {gpu.multi_processor_count}"
        found["tf32"] = f"cudnn {torch.backends.cudnn.allow_tf32}"
        found["cudnn"] = str(torch.backends.cudnn.version())
        nccl: Any = getattr(torch.cuda, "nccl")  # noqa: B009  # not declared in torch.cuda
        found["nccl"] = ".".join(str(part) for part in nccl.version())
    return found


def machine_digest() -> float:
    """Digest what decides the bits of a kernel: versions, threads, kind of processor."""
    return float(folded(sorted({**versions(), "machine": platform.machine()}.items())))


def machine_warning(rows: Sequence[Sequence[float]], reduction: str) -> list[str]:
    """Return a sentence when ranks compute with different versions, threads or devices."""
    odd = minority_ranks(rows)
    if not odd:
        return []
    price = (
        "the bits of the result may depend on who computes which leaf"
        if reduction == "reproducible"
        else "results may not repeat to the bit"
    )
    verb = "computes" if len(odd) == 1 else "compute"
    sentence = (
        f"{named_ranks(odd)} {verb} with another version of torch, number of threads or kind of "
        f"processor than the others: {price}"
    )
    return [sentence]


# ------------------------------------------------------------------ Equal start
# Gradients are summed whatever they belong to, so nothing later would reveal ranks that began with
# other weights. Ranks compare digests when an accumulator is built, with one small exchange; where
# they differ, a second one tells which ranks differ in what.


Trait = tuple[str, str]
"""Name and value of something that has to be equal on all ranks."""

_NUMBERS = "the numbers of "


def check_same_start(
    group: BaseGroup,
    model: Any,
    named: Named,
    optimizer: Optimizer,
    options: AccumulationOptions,
    replicate_group: BaseGroup,
    replicate_ranks: Sequence[int],
) -> None:
    """Check that all ranks begin with the same. Collective.

    Args:
        group: the ranks; alone, nothing is done.
        replicate_group: those whose numbers are the same: all, unless the model is sharded.
        replicate_ranks: their numbers in `group`.
        model: its buffers are looked at, too, where it is a module.
        named: its parameters, trained or not.
        optimizer: with its groups and its state.
        options: of the accumulator. With `broadcast` all ranks are first given rank 0's parameters
            and buffers.

    Raises:
        JobError: on all ranks alike, naming those that differ, and in what first.
    """
    if group.size == 1:
        return
    buffers = list(model.named_buffers()) if isinstance(model, Module) else []
    tensors = [*named, *buffers]
    whole = [(name, tensor) for name, tensor in tensors if not is_sharded(tensor)]
    shards = [(name, local_part(tensor)) for name, tensor in tensors if is_sharded(tensor)]
    shapes = [
        (f"the accumulator's {name}", repr(value))
        for name, value in options.shared_by_ranks().items()
    ]
    for kind, listed in (("parameter", named), ("buffer", buffers)):
        for number, (name, tensor) in enumerate(listed):
            form = f"{tensor.dtype} {tuple(tensor.shape)}".removeprefix("torch.")
            form += ", trained" if tensor.requires_grad else ""
            shapes.append((f"{kind} number {number}", f"{name} ({form})"))
    if options.broadcast:
        check_same_traits(group, shapes)
        broadcast_tensors(group, [tensor for _, tensor in whole])
        broadcast_tensors(replicate_group, [tensor for _, tensor in shards])
    for_all = [*shapes, *_numbers(whole), *_optimizer_settings(optimizer, named)]
    of_replicas = [*_numbers(shards), *_optimizer_state(optimizer, named)]
    if not shards:
        check_same_traits(group, [*for_all, *of_replicas])
        return
    check_same_traits(group, for_all)
    error: JobError | None = None
    try:
        check_same_traits(replicate_group, of_replicas, replicate_ranks)
    except JobError as found:
        error = found
    odd = ranks_where(group, error is not None)
    if error is not None:
        raise error
    if odd:
        raise JobError(f"the shards of {named_ranks(odd)} are not the same in all copies")


def check_same_traits(
    group: BaseGroup, traits: Sequence[Trait], numbers: Sequence[int] | None = None
) -> None:
    """Raise `JobError`, on all ranks alike, unless all have the same traits. Collective.

    Args:
        numbers: of the group's ranks, for messages, where they are a part of all.
    """
    odd = minority_ranks(gather_numbers(group, [float(folded(traits))]))
    if not odd:
        return
    every = [json.loads(text) for text in gather_texts(group, json.dumps(list(traits)))]
    usual: list[Trait] = every[next(rank for rank in range(group.size) if rank not in odd)]
    theirs: list[Trait] = every[odd[0]]
    numbers = [(numbers or range(group.size))[rank] for rank in odd]
    who, verb = named_ranks(numbers), "differ" if len(odd) > 1 else "differs"
    pairs = list(zip_longest(usual, theirs, fillvalue=("", "nothing")))
    (what, value), (_, other) = next((a, b) for a, b in pairs if a != b)
    if what.startswith(_NUMBERS):
        count = sum(a != b and a[0].startswith(_NUMBERS) for a, b in pairs)
        raise JobError(
            f"the model is not the same on every rank: {who} {verb} from the others in {count} of "
            f"its tensors, first in {what}. Build the model from one seed on every rank "
            "(torch.manual_seed), or load the same file; Accumulator(..., broadcast=True) gives "
            "all ranks rank 0's numbers, as DDP does"
        )
    raise JobError(
        f"ranks do not start alike: {who} {verb} from the others, first in {what}: it is {other} "
        f"on rank {numbers[0]}, and {value} on others"
    )


def _numbers(tensors: Named) -> Iterator[Trait]:
    for name, tensor in tensors:
        yield f"{_NUMBERS}{name}", _digest(tensor)


def _optimizer_settings(optimizer: Optimizer, named: Named) -> Iterator[Trait]:
    name_of = {id(tensor): name for name, tensor in reversed(named)}
    yield "the optimizer", type(optimizer).__qualname__
    for number, group in enumerate(optimizer.param_groups):
        for key in sorted(group):
            value = group[key]
            if key == "params":
                value = [name_of.get(id(parameter)) for parameter in value]
            yield f"{key} of the optimizer's group {number}", _digest(value)


def _optimizer_state(optimizer: Optimizer, named: Named) -> Iterator[Trait]:
    name_of = {id(tensor): name for name, tensor in reversed(named)}
    for parameter, state in optimizer.state.items():
        for key in sorted(state, key=str):
            yield f"the optimizer's {key} of {name_of.get(id(parameter))}", _digest(state[key])


def _digest(value: Any) -> str:
    """Return a tensor's digest; a function's name; anything else as Python's repr."""
    if callable(value):  # whose repr holds an address
        return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return f"{tensor_digest(local_part(value)):x}" if isinstance(value, Tensor) else repr(value)
