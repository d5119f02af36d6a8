"""Checks when an accumulator is built: arguments, supported models, equal ranks."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from orchestrator.engine.api import AccumulationOptions
from orchestrator.engine.common.packed_sums import MOST_RANKS
from orchestrator.engine.common.replicas import minority_ranks
from orchestrator.engine.torch.buffers import named_parameters, trained
from orchestrator.engine.torch.group import BaseGroup, gather_numbers, gather_texts
from orchestrator.errors import ConfigError, JobError
from orchestrator.plan.plan_warnings import named_ranks

_GROUP = (
    "group must be a TorchGroup: TorchGroup.wrap(torch.distributed.group.WORLD) after "
    "init_process_group(), or TorchGroup.alone() for one process"
)
_MODEL = "model must be a torch.nn.Module, or its parameters (with or without names)"


def check_arguments(model: Any, group: Any, options: AccumulationOptions) -> list[Any] | Module:
    """Return the model; parameters become a list. Raises `ConfigError` for anything else.

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
    clip_norm = options.clip_norm
    if clip_norm is not None and not (_is_number(clip_norm) and clip_norm > 0):
        raise ConfigError(f"clip_norm must be a number above 0, but is {clip_norm!r}")
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


def _words(value: Any) -> str:
    if value is None or isinstance(value, (int, float, str)):
        return repr(value)
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


# ------------------------------------------------------------------
# Supported models and optimizers


_PLAIN: Any = torch.nn.Parameter.__torch_dispatch__  # pyright: ignore[reportAttributeAccessIssue]
_REDUCES_ITSELF = {
    "DistributedDataParallel": "give the accumulator the module within, model.module, and call "
    "that one in your loop",
    "FullyShardedDataParallel": "give it the plain model; shard_optimizer=True shards the "
    "optimizer's state",
    "FSDPModule": "give it the plain model; shard_optimizer=True shards the optimizer's state",
}
"""Wrappers of torch, by the names of their classes: to import them would take a second."""


def check_supported(
    model: Module | Iterable[tuple[str, Tensor]] | Iterable[Tensor], optimizer: Optimizer
) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
    """Return all named parameters of `model`, and the trained ones, each once.

    Raises:
        JobError: there is nothing to train.
        ConfigError: a wrapper or a parameter that cannot be served, or the optimizer is another
            model's.
    """
    for name, layer in model.named_modules() if isinstance(model, Module) else ():
        for kind in type(layer).__mro__:
            if kind.__name__ in _REDUCES_ITSELF and kind.__module__.startswith("torch."):
                where = f"layer {name}" if name else "the model"
                raise ConfigError(
                    f"{where} is wrapped in {kind.__name__}, which reduces gradients by itself in "
                    f"every backward: {_REDUCES_ITSELF[kind.__name__]}"
                )
    named = named_parameters(model)
    parameters = trained(named)
    for name, parameter in parameters:
        if reason := _unsupported_reason(parameter):
            raise ConfigError(f"parameter {name} {reason}")
    _check_optimizer(optimizer, parameters)
    return named, parameters


def _unsupported_reason(parameter: Any) -> str | None:  # noqa: PLR0911  # one for each reason
    kind = type(parameter)
    if any(one.__name__ == "DTensor" for one in kind.__mro__):
        return f"is a DTensor, whose gradient is reduced by itself: {_REDUCES_ITSELF['FSDPModule']}"
    if isinstance(parameter, UninitializedParameter):
        return "has no shape yet, as it is a lazy layer's: call the model once before"
    if kind.__torch_dispatch__ is not _PLAIN:
        return (
            f"is a {kind.__name__}, not a plain tensor: its gradient cannot be laid in flat buffers"
        )
    if parameter.device.type == "meta":
        return "is on the meta device, without numbers: give the model memory before (to_empty)"
    if parameter.layout is not torch.strided:
        return f"is stored as {parameter.layout}; parameters have to be dense"
    if not parameter.is_leaf:
        return "was computed from other tensors: give the accumulator what it was computed from"
    return None


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


def versions() -> dict[str, str]:
    """Return the versions of libraries and devices. Equal facts, equal bits."""
    found: dict[str, str] = {
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["cudnn"] = str(torch.backends.cudnn.version())
        nccl: Any = getattr(torch.cuda, "nccl")  # noqa: B009  # not declared in torch.cuda
        found["nccl"] = ".".join(str(part) for part in nccl.version())
    return found


# ------------------------------------------------------------------ Equal machines


_WORD_BITS = 48  # float64 carries 53 exactly
_WORDS = 5


def digest_to_floats(hexadecimal: str) -> list[float]:
    """Return the first 240 bits of a digest as numbers that survive a float64."""
    digits = _WORD_BITS // 4
    return [float(int(hexadecimal[n * digits : (n + 1) * digits], 16)) for n in range(_WORDS)]


def machine_digest() -> str:
    """Digest what decides the bits of a kernel: versions, threads, kind of processor."""
    facts = {**versions(), "machine": platform.machine()}
    return hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()


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
_REMEDY = (
    "Build the model from one seed on every rank (torch.manual_seed), or load the same file; "
    "Accumulator(..., broadcast=True) gives all ranks rank 0's numbers, as DDP does"
)


def check_same_start(
    group: BaseGroup,
    model: Any,
    named: Sequence[tuple[str, Tensor]],
    optimizer: Optimizer,
    settings: Mapping[str, Any],
    *,
    broadcast: bool,
) -> None:
    """Check that all ranks begin with the same. Collective.

    Args:
        group: the ranks; alone, nothing is done.
        model: its buffers are looked at, too, where it is a module.
        named: its parameters, trained or not.
        optimizer: with its groups and its state.
        settings: of the accumulator, as they have to be on all ranks.
        broadcast: first give all ranks rank 0's parameters and buffers.

    Raises:
        JobError: on all ranks alike, naming those that differ, and in what first.
    """
    if group.size == 1:
        return
    buffers = list(model.named_buffers()) if isinstance(model, Module) else []
    tensors = [*named, *buffers]
    shapes = [(f"the accumulator's {name}", repr(value)) for name, value in settings.items()]
    shapes += [*_shapes(named, "parameter"), *_shapes(buffers, "buffer")]
    if broadcast:
        check_same_traits(group, shapes)
        broadcast_tensors(group, [tensor for _, tensor in tensors])
    numbers = [(f"{_NUMBERS}{name}", sha256_of(tensor)) for name, tensor in tensors]
    check_same_traits(group, [*shapes, *numbers, *_optimizer(optimizer, named)])


def check_same_traits(group: BaseGroup, traits: Sequence[Trait]) -> None:
    """Raise `JobError`, on all ranks alike, unless all have the same traits. Collective."""
    digest = hashlib.sha256(repr(list(traits)).encode()).hexdigest()
    odd = minority_ranks(gather_numbers(group, digest_to_floats(digest)))
    if odd:
        texts = gather_texts(group, json.dumps(list(traits)))
        traits_of_ranks = [[(what, value) for what, value in json.loads(t)] for t in texts]
        usual = next(rank for rank in range(group.size) if rank not in odd)
        raise _error(traits_of_ranks[usual], traits_of_ranks[odd[0]], odd)


def _error(usual: list[Trait], theirs: list[Trait], odd: Sequence[int]) -> JobError:
    who = named_ranks(odd)
    verb = "differ" if len(odd) > 1 else "differs"
    (what, value), (_, other) = next(
        (a, b)
        for a, b in zip(
            [*usual, *[("", "nothing")] * len(theirs)],
            [*theirs, *[("", "nothing")] * len(usual)],
            strict=False,
        )
        if a != b
    )
    if what.startswith(_NUMBERS):
        count = sum(
            a != b and a[0].startswith(_NUMBERS) for a, b in zip(usual, theirs, strict=False)
        )
        return JobError(
            f"the model is not the same on every rank: {who} {verb} from the others in "
            f"{count} of its tensors, first in {what}. {_REMEDY}"
        )
    return JobError(
        f"ranks do not start alike: {who} {verb} from the others, first in {what}: it is {other} "
        f"on rank {odd[0]}, and {value} on others"
    )


# ------------------------------------------------------------------ what is compared


def _shapes(tensors: Sequence[tuple[str, Tensor]], kind: str) -> Iterator[Trait]:
    for number, (name, tensor) in enumerate(tensors):
        trained = ", trained" if tensor.requires_grad else ""
        yield (
            f"{kind} number {number}",
            f"{name} ({tensor.dtype} {tuple(tensor.shape)}{trained})".replace("torch.", ""),
        )


def _optimizer(optimizer: Optimizer, named: Sequence[tuple[str, Tensor]]) -> Iterator[Trait]:
    name_of = {id(tensor): name for name, tensor in reversed(named)}
    yield "the optimizer", type(optimizer).__qualname__
    for number, group in enumerate(optimizer.param_groups):
        for key in sorted(group):
            value = group[key]
            if key == "params":
                value = [name_of.get(id(parameter)) for parameter in value]
            yield f"{key} of the optimizer's group {number}", _describe(value)
    for parameter, state in optimizer.state.items():
        for key in sorted(state, key=str):
            yield (
                f"the optimizer's {key} of {name_of.get(id(parameter))}",
                _describe(state[key]),
            )


def _describe(value: Any) -> str:
    return sha256_of(value) if isinstance(value, Tensor) else repr(value)


def _bytes(tensor: Tensor) -> Tensor:
    """Return its bytes, flat: its own memory where it is contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def sha256_of(tensor: Tensor) -> str:
    """Return the first 16 digits of the SHA-256 of its bytes."""
    return hashlib.sha256(_bytes(tensor).cpu().numpy().data).hexdigest()[:16]


def broadcast_tensors(group: BaseGroup, tensors: Iterable[Tensor], source: int = 0) -> None:
    """Give all ranks rank `source`'s numbers, of whatever type. Collective."""
    for tensor in tensors:
        if tensor.numel():
            numbers = _bytes(tensor)
            group.broadcast(numbers, source)
            if numbers.data_ptr() != tensor.data_ptr():
                own = numbers.view(tensor.dtype).view(tensor.shape)
                tensor.detach().copy_(own)
