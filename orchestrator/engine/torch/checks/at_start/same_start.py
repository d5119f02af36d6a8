"""Ranks have to start alike: the same model, numbers, optimizer and settings on each of them.

Nothing would show it later, since gradients are summed whatever they belong to: ranks that began
with other weights train other models. So ranks compare digests when an accumulator is built, with
one small exchange; where they differ, a second one tells who differs in what.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from orchestrator.engine.torch.checks.at_start.same_machine import as_numbers, unlike_most
from orchestrator.engine.torch.comm.base_group import BaseGroup
from orchestrator.engine.torch.comm.gathered import numbers_of_all, texts_of_all
from orchestrator.errors import JobError
from orchestrator.plan.plan_warnings import named_ranks

Trait = tuple[str, str]
"""What it is of, and what this rank has there."""

_NUMBERS = "the numbers of "
_REMEDY = (
    "Build the model from one seed on every rank (torch.manual_seed), or load the same file; "
    "Accumulator(..., broadcast=True) gives all ranks rank 0's numbers, as DDP does"
)


def start_alike(
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
    shapes = [*_settings(settings), *_shapes(named, "parameter"), *_shapes(buffers, "buffer")]
    if broadcast:
        same_on_all(group, shapes)
        spread(group, [tensor for _, tensor in tensors])
    numbers = [(f"{_NUMBERS}{name}", sha256_of(tensor)) for name, tensor in tensors]
    same_on_all(group, [*shapes, *numbers, *_optimizer(optimizer, named)])


def same_on_all(group: BaseGroup, traits: Sequence[Trait]) -> None:
    """Raise `JobError`, on all ranks alike, unless all have the same traits. Collective."""
    digest = hashlib.sha256(repr(list(traits)).encode()).hexdigest()
    odd = unlike_most(numbers_of_all(group, as_numbers(digest)))
    if odd:
        told = [[(what, value) for what, value in json.loads(t)] for t in _told(group, traits)]
        usual = next(rank for rank in range(group.size) if rank not in odd)
        raise _error(told[usual], told[odd[0]], odd)


def _told(group: BaseGroup, traits: Sequence[Trait]) -> list[str]:
    return texts_of_all(group, json.dumps(list(traits)))


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


def _settings(settings: Mapping[str, Any]) -> Iterator[Trait]:
    for name, value in settings.items():
        yield f"the accumulator's {name}", repr(value)


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
            yield f"{key} of the optimizer's group {number}", _told_of(value)
    for parameter, state in optimizer.state.items():
        for key in sorted(state, key=str):
            yield (
                f"the optimizer's {key} of {name_of.get(id(parameter))}",
                _told_of(state[key]),
            )


def _told_of(value: Any) -> str:
    return sha256_of(value) if isinstance(value, Tensor) else repr(value)


def _bytes(tensor: Tensor) -> Tensor:
    """Its bytes, flat: its own memory where it is contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def sha256_of(tensor: Tensor) -> str:
    """The first 16 digits of the SHA-256 of its bytes."""
    return hashlib.sha256(_bytes(tensor).cpu().numpy().data).hexdigest()[:16]


def spread(group: BaseGroup, tensors: Iterable[Tensor], source: int = 0) -> None:
    """Give all ranks rank `source`'s numbers, of whatever type. Collective."""
    for tensor in tensors:
        if tensor.numel():
            numbers = _bytes(tensor)
            group.broadcast(numbers, source)
            if numbers.data_ptr() != tensor.data_ptr():
                own = numbers.view(tensor.dtype).view(tensor.shape)
                tensor.detach().copy_(own)
