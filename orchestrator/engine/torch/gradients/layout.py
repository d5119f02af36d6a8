"""Which numbers of which flat buffer are a parameter's gradient, and where buckets are cut. Pure.

One buffer for each device and real dtype; complex parameters live in their real dtype's buffer.
Within one, parameters lie in the order in which their gradients are expected to become ready, so
that buckets, which are plain slices, fill up one after the other during a backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Module

from orchestrator.errors import ConfigError, JobError
from orchestrator.plan.wire import bucket_count

_ALIGNED = 16
_EXACT = (torch.float32, torch.float64)  # dtypes that add up a trailer's limbs without rounding


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter's gradient lies: `count` real numbers of buffer `buffer` from `start`."""

    name: str
    parameter: Tensor
    buffer: int
    start: int
    count: int


@dataclass(slots=True)
class BufferPlan:
    """One buffer in the making: its parameters in their order."""

    device: torch.device
    dtype: torch.dtype
    members: list[tuple[str, Tensor]] = field(default_factory=list[tuple[str, Tensor]])


def named_parameters(
    model: Module | Iterable[tuple[str, Tensor]] | Iterable[Tensor],
) -> list[tuple[str, Tensor]]:
    """The parameters of a module, or those that are given, with names."""
    if isinstance(model, Module):
        return list(model.named_parameters())
    named: list[tuple[str, Tensor]] = []
    for number, item in enumerate(model):
        named.append((f"parameter {number}", item) if isinstance(item, Tensor) else item)
    return named


def trained(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """The parameters that get gradients, each once, with the first of its names.

    Raises:
        JobError: there is none, or one is not of a floating or complex dtype.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            found.setdefault(id(parameter), (name, parameter))
    if not found:
        raise JobError("the model has no parameter to train: none has requires_grad=True")
    return list(found.values())


def real_numbers(tensor: Tensor) -> int:
    """How many real numbers `tensor` holds: two for each complex one."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def buffer_plans(
    parameters: Sequence[tuple[str, Tensor]], *, trailer: bool, order: Sequence[int] | None = None
) -> list[BufferPlan]:
    """The buffers for `parameters`.

    Args:
        order: of the parameters' numbers within a buffer; the reverse of theirs by default, which
            a backward comes near to.
        trailer: the last buffer has to carry one, so it is of a dtype that does not round it.

    Raises:
        JobError: a parameter is not of a floating or complex dtype.
        ValueError: `order` does not hold each parameter's number once.
    """
    if order is None:
        order = range(len(parameters) - 1, -1, -1)
    if sorted(order) != list(range(len(parameters))):
        raise ValueError(
            f"`order` must hold each number below {len(parameters)} once, but is {list(order)}"
        )
    plans: dict[tuple[torch.device, torch.dtype], BufferPlan] = {}
    for name, parameter in (parameters[number] for number in order):
        if not (parameter.is_floating_point() or parameter.is_complex()):
            raise JobError(
                f"parameter {name} is {parameter.dtype}; gradients need a floating dtype"
            )
        dtype = parameter.real.dtype if parameter.is_complex() else parameter.dtype
        key = (parameter.device, dtype)
        plans.setdefault(key, BufferPlan(*key)).members.append((name, parameter))
    for plan in plans.values():  # pairs of reals have to begin at even places
        plan.members.sort(key=lambda member: not member[1].is_complex())
    # The trailer's buffer comes last, because the trailer is what is known last.
    ordered = sorted(plans.values(), key=lambda plan: plan.dtype in _EXACT)
    if trailer and ordered[-1].dtype not in _EXACT:
        ordered.append(BufferPlan(ordered[-1].device, torch.float32))
    return ordered


def bucket_slices(
    payloads: Sequence[Tensor],
    bucket_bytes: int | None,
    itemsize: int | None = None,
    *,
    multiple_of: int = 1,
) -> list[tuple[int, int, int]]:
    """Cut each payload into `plan.wire.bucket_count` equal slices: (buffer, start, end) in numbers.

    Args:
        itemsize: what a number has in bytes while it travels, where that is less than it has here.
        multiple_of: lengths of slices are multiples of this, as those of payloads are.

    Raises:
        ConfigError: a bucket is too small to hold one number.
    """
    slices: list[tuple[int, int, int]] = []
    for number, payload in enumerate(payloads):
        size = min(payload.element_size(), itemsize or payload.element_size())
        if bucket_bytes is not None and bucket_bytes < size:
            raise ConfigError(
                f"a bucket of {bucket_bytes} bytes holds no number of {payload.dtype}; "
                f"engine.bucket_mib must be at least {size / 2**20:.3g}"
            )
        count = bucket_count(payload.numel() * size, bucket_bytes)
        atoms = payload.numel() // multiple_of
        ends = [atoms * bucket // count * multiple_of for bucket in range(1, count + 1)]
        slices += [
            (number, start, end)
            for start, end in zip([0, *ends], ends, strict=False)
            if end > start
        ]
    return slices


def segment_of(bucket: tuple[int, int, int], rank: int, ranks: int) -> tuple[int, int, int]:
    """What rank `rank` owns of a bucket of equally long segments, one for each of `ranks`.

    >>> segment_of((0, 30, 60), rank=1, ranks=3)
    (0, 40, 50)
    """
    buffer, start, end = bucket
    length = (end - start) // ranks
    return buffer, start + rank * length, start + (rank + 1) * length


def aligned_first(
    parameters: Sequence[tuple[str, Tensor]], order: Sequence[int] | None
) -> list[int]:
    """`order`, as `buffer_plans` takes it, with parameters of odd sizes moved to the end.

    So all others begin at multiples of 16 numbers, as kernels want their weights, although nothing
    is put between them.
    """
    if order is None:
        order = range(len(parameters) - 1, -1, -1)
    return sorted(order, key=lambda number: real_numbers(parameters[number][1]) % _ALIGNED != 0)
