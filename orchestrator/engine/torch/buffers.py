"""Flat gradient buffers: layout, accumulation, gradient hooks, used parameters."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.weak import WeakTensorKeyDictionary

from orchestrator.engine.common.packed_sums import USES_ALL, USES_CHANGED, Trailer
from orchestrator.engine.torch.group import BaseGroup, version_of
from orchestrator.errors import ConfigError, JobError
from orchestrator.plan.wire import bucket_count, trailer_numbers

_ALIGNED = 16
_EXACT = (torch.float32, torch.float64)  # dtypes that add up a trailer's limbs without rounding


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a parameter's gradient: `count` real numbers of buffer `buffer` from `start`."""

    name: str
    parameter: Tensor
    buffer: int
    start: int
    count: int


Plan = tuple[torch.device, torch.dtype, list[int]]
"""One buffer: where it is, its type, and its parameters' numbers in their order."""


def named_parameters(
    model: Module | Iterable[tuple[str, Tensor]] | Iterable[Tensor],
) -> list[tuple[str, Tensor]]:
    """Return the parameters of a module, or those that are given, with names."""
    if isinstance(model, Module):
        return list(model.named_parameters())
    named: list[tuple[str, Tensor]] = []
    for number, item in enumerate(model):
        named.append((f"parameter {number}", item) if isinstance(item, Tensor) else item)
    return named


def trained(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return the parameters that get gradients, each once, with the first of its names.

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
    """Return how many real numbers `tensor` holds: two for each complex one."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def buffer_plans(
    parameters: Sequence[tuple[str, Tensor]], *, trailer: bool, order: Sequence[int] | None = None
) -> list[Plan]:
    """Return the buffers for `parameters`.

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
    plans: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number in order:
        name, parameter = parameters[number]
        if not (parameter.is_floating_point() or parameter.is_complex()):
            raise JobError(
                f"parameter {name} is {parameter.dtype}; gradients need a floating dtype"
            )
        dtype = parameter.real.dtype if parameter.is_complex() else parameter.dtype
        plans.setdefault((parameter.device, dtype), []).append(number)
    for members in plans.values():  # pairs of reals have to begin at even places
        members.sort(key=lambda number: not parameters[number][1].is_complex())
    # The trailer's buffer comes last, because the trailer is what is known last.
    ordered: list[Plan] = sorted(
        ((*key, members) for key, members in plans.items()), key=lambda plan: plan[1] in _EXACT
    )
    if trailer and ordered[-1][1] not in _EXACT:
        ordered.append((ordered[-1][0], torch.float32, []))
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
    """Return rank `rank`'s segment of a bucket of `ranks` equally long segments.

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


# ------------------------------------------------------------------ Gradient buffers
# A window begins with every `.grad` None. The gradients of its first backward are copied into
# their places as they come; autograd adds all later ones there itself. So no time goes into zeros,
# and nothing is copied together to be reduced. The trailer's numbers end the last buffer.
#
# Only a backward may write gradients. Each view has its own count of in-place writes (torch's
# version), which grows by one for each gradient that is added. Any other write, and any other
# tensor in `.grad`, is found at the next check and refused.


_GRADIENT = attrgetter("grad")


class GradientBuffers:
    """The buffers of one model, and the gradients as views into them.

    Args:
        parameters: what `trained` gives.
        metric_count: metrics that the trailer carries; None for no trailer at all.
        pad_to: each buffer is allocated in multiples of this; the padding is never reduced as
            gradient and stays zero.
        order: see `buffer_plans`.
        used: 1 is written there for each parameter that gets a gradient; one for all sets of
            buffers of a model.

    Attributes:
        flats: the buffers, padding included. The trailer ends the payload of the last one.
        payloads: their meaningful parts: gradients, in the last one the trailer as well.
        gradients: their gradients alone.
        views: one for each parameter, in the order of `parameters`.
        trailer: the trailer's numbers.
        versions: what each view's version is to be: a backward that adds to one counts there.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor]],
        *,
        metric_count: int | None = 0,
        pad_to: int = 1,
        order: Sequence[int] | None = None,
        used: bytearray | None = None,
    ) -> None:
        self.metric_count, self.pad_to, self.order = metric_count, pad_to, order
        self.parameters = list(parameters)
        self.used = bytearray(len(self.parameters)) if used is None else used
        trailer = 0 if metric_count is None else trailer_numbers(metric_count)
        plans = buffer_plans(self.parameters, trailer=trailer > 0, order=order)
        self.flats: list[Tensor] = []
        self.payloads: list[Tensor] = []
        self.gradients: list[Tensor] = []
        places: dict[int, Place] = {}
        for buffer, (device, dtype, members) in enumerate(plans):
            start = 0
            for number in members:
                name, parameter = self.parameters[number]
                count = real_numbers(parameter)
                places[number] = Place(name, parameter, buffer, start, count)
                start += count
            length = start + (trailer if buffer == len(plans) - 1 else 0)
            padded = -(-length // pad_to) * pad_to
            flat = torch.zeros(padded, dtype=dtype, device=device)
            self.flats.append(flat)
            self.payloads.append(flat[:length])
            self.gradients.append(flat[:start])
        self.trailer = self.payloads[-1][self.gradients[-1].numel() :]
        self.places = [places[number] for number in range(len(self.parameters))]
        # A view by `.data` has a version of its own, which writing in the flat buffer leaves alone.
        self.views = [
            view_of(self.flats[place.buffer], place, place.start).data for place in self.places
        ]
        self._tensors = [parameter for _, parameter in self.parameters]
        self._addresses = [view.data_ptr() for view in self.views]
        self.versions = [0] * len(self.views)
        self._filled = bytearray(len(self.places))  # 1 where a gradient is in its place
        self._checked = False  # in this backward, what is in no view's place was None before it

    def clone_layout(self) -> GradientBuffers:
        """Return further buffers of the same layout, zero."""
        return GradientBuffers(
            self.parameters,
            metric_count=self.metric_count,
            pad_to=self.pad_to,
            order=self.order,
            used=self.used,
        )

    def begin(self) -> None:
        """Begin a window or a leaf: every `.grad` is None, trailer and padding are zero."""
        self._filled[:] = bytes(len(self._filled))
        for flat, gradient in zip(self.flats, self.gradients, strict=True):
            flat[gradient.numel() :].zero_()
        for parameter in self._tensors:
            parameter.grad = None
        self.versions[:], self._checked = map(version_of, self.views), False

    def check_before_backward(self) -> bool:
        """Check before a backward that every `.grad` is its view, or None; return whether there
        are gradients already, to which it adds.

        A `.grad` of None (after `zero_grad(set_to_none=True)`) takes nothing away from what was
        accumulated.

        Raises:
            JobError: another tensor is in its place.
        """
        before, begun = map(_GRADIENT, self._tensors), 1 in self._filled
        if not all(map(is_, before, self.views if begun else repeat(None))):
            for number, (parameter, view) in enumerate(zip(self._tensors, self.views, strict=True)):
                if parameter.grad is not None and parameter.grad is not view:
                    raise self._foreign_write(number)
        self._checked = True
        return begun

    def take(self, number: int) -> None:
        """Put the gradient of parameter `number`, which a backward has added to, in its place.

        The window's first is copied there; one that found `.grad` to be None later is added; what
        autograd added in place is there already.

        Raises:
            JobError: something else wrote there.
        """
        parameter, view = self._tensors[number], self.views[number]
        found = parameter.grad
        if found is view:
            version = version_of(view)
            if version != self.versions[number] + 1 or not self._filled[number]:
                raise self._foreign_write(number)
            self.versions[number] = version
            return
        if found is None:
            raise JobError(
                f"the gradient of {self.parameters[number][0]} was taken away within the backward "
                "that made it, by a register_post_accumulate_grad_hook() perhaps: an optimizer "
                "cannot step there, as the update is made at the boundary"
            )
        if found.requires_grad:
            return  # `store_late` refuses it
        if not self._filled[number]:
            if found.is_sparse:
                view.zero_().add_(found)
            else:
                view.copy_(found)
        elif self._checked:
            view.add_(found)
        else:
            raise self._foreign_write(number)
        self._filled[number] = self.used[number] = 1
        self.versions[number] = version_of(view)
        parameter.grad = view

    def store_late(self) -> None:
        """Put gradients in their places that came in a backward which was only counted, and check
        that nothing else was written.

        Raises:
            JobError: one is not a backward's, or a backward with `create_graph=True` replaced it.
        """
        if not all(map(is_, map(_GRADIENT, self._tensors), self.views)):
            for number, (parameter, view) in enumerate(zip(self._tensors, self.views, strict=True)):
                found = parameter.grad
                came = self.versions[number] > version_of(view)
                if found is view or (found is None and not (came or self._filled[number])):
                    continue
                if found is None and not came:
                    parameter.grad = view
                    continue
                if not came or (found is not None and found.requires_grad):
                    raise self._foreign_write(number)
                self.take(number)
        self._checked = False
        if list(map(version_of, self.views)) != self.versions:
            self.verify()

    def verify(self) -> None:
        """Raise `JobError` unless the last to write in each view was a backward."""
        versions = list(map(version_of, self.views))
        addresses = [view.data_ptr() for view in self.views]
        if versions != self.versions or addresses != self._addresses:
            now = zip(versions, addresses, strict=True)
            before = zip(self.versions, self._addresses, strict=True)
            raise self._foreign_write(
                next(n for n, (a, b) in enumerate(zip(now, before, strict=True)) if a != b)
            )

    def complete(self) -> None:
        """Check as `store_late`, and write zeros where no gradient came, so buffers can be
        summed.
        """
        self.store_late()
        self.verify()
        if 0 in self._filled:
            for number, view in enumerate(self.views):
                if not self._filled[number]:
                    view.zero_()
                    self.versions[number] = version_of(view)
            self.attach()

    def _foreign_write(self, number: int) -> JobError:
        name, parameter = self.parameters[number]
        if parameter.grad is not None and parameter.grad.requires_grad:
            return JobError(
                f"the gradient of {name} carries a graph: accumulate by plain backward(); for "
                "gradient penalties use torch.autograd.grad(..., create_graph=True)"
            )
        return JobError(
            f"the gradient of {name} was written by something else than a backward: between a "
            "window's start and its boundary only backward() adds to .grad. To clip use "
            "Accumulator(..., clip_norm=...), to scale or mask use parameter.register_hook(...); "
            "zero_grad() is not needed; gradients from torch.func or by hand cannot be accumulated"
        )

    def attach(self) -> None:
        """Show the buffers' numbers: every `.grad` is its view, whatever it was."""
        self._filled[:] = bytes([1]) * len(self._filled)
        if not all(map(is_, map(_GRADIENT, self._tensors), self.views)):
            for parameter, view in zip(self._tensors, self.views, strict=True):
                parameter.grad = view

    def detach(self, unused: Iterable[int]) -> None:
        """Set `.grad` of these parameters to None, so that the optimizer leaves them alone."""
        for number in unused:
            self.parameters[number][1].grad = None

    def non_finite(self) -> list[str]:
        """Return the parameters whose gradient holds NaN or infinity. Not collective."""
        return [
            name
            for (name, _), view in zip(self.parameters, self.views, strict=True)
            if not bool(torch.isfinite(view).all())
        ]


def view_of(flat: Tensor, place: Place, start: int = 0) -> Tensor:
    """Return the numbers of `flat` from `start` on, in the shape and strides of the parameter at
    `place`.

    A complex parameter's are pairs of reals there; of another dtype than `flat`'s it may be.
    """
    parameter = place.parameter
    part = flat[start : start + place.count]
    if parameter.is_complex():
        part = torch.view_as_complex(part.view(-1, 2))
    # Fused optimizers want the gradient's strides to be the parameter's. They can be where the
    # parameter is dense, which is where an empty_like has its strides.
    if torch.empty_like(parameter, device="meta").stride() == parameter.stride():
        return part.as_strided(parameter.size(), parameter.stride(), part.storage_offset())
    return part.view(parameter.shape)


# ------------------------------------------------------------------ Gradient hooks
# Hooks take most of what an accumulator costs in a micro-step, since they run Python once for each
# parameter. Where it is enough to know that a gradient came, the hook only counts it.


_OWNERS: Any = WeakTensorKeyDictionary()
"""By parameter a weak reference to the accumulator whose hook it has."""


class GradHooks:
    """The gradient hooks of one accumulator: they call `owner.gradient_ready(number)`.

    Args:
        owner: the accumulator, held weakly: hooks on a model keep no accumulator alive.
        named: its parameters.

    Attributes:
        counts: while set, hooks count gradients there, by parameter, instead of calling the owner.

    Raises:
        ConfigError: a parameter has the hook of another accumulator.
    """

    def __init__(self, owner: Any, named: Sequence[tuple[str, Tensor]]) -> None:
        def owned() -> list[str]:
            return [name for name, p in named if p in _OWNERS and _OWNERS[p]() is not None]

        if owned():
            gc.collect()  # an accumulator without references may only wait for collection
        if names := owned():
            raise ConfigError(
                f"parameter {names[0]} belongs to another accumulator: one model has one, and each "
                "parameter's gradient is reduced once. close() the other one first"
            )
        self.counts: list[int] | None = None
        self._owner = weakref.ref(owner)
        self._parameters = [parameter for _, parameter in named]
        for parameter in self._parameters:
            _OWNERS[parameter] = self._owner
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook_of(number))
            for number, parameter in enumerate(self._parameters)
        ]

    def _hook_of(self, number: int) -> Callable[[Tensor], None]:
        def ready(_: Tensor) -> None:
            if self.counts is not None:
                self.counts[number] += 1
            elif (owner := self._owner()) is not None:
                owner.gradient_ready(number)

        return ready

    def remove(self) -> None:
        """Remove the hooks, so that another accumulator may register its own."""
        for handle in self._handles:
            handle.remove()
        for parameter in self._parameters:
            _OWNERS.pop(parameter, None)


# ------------------------------------------------------------------ Unused parameters
# One process would leave the `.grad` of an unused parameter None, so that weight decay and
# momentum do not touch it. To do the same, ranks have to agree, and two flags of the trailer
# nearly always suffice: some rank used every parameter, or no rank's set changed since the last
# exchange. Only when both fail do ranks exchange the sets, with one small all-reduce.


class UsedParameters:
    """The sets of used parameters of one rank and, by agreement, of all.

    Attributes:
        mine: 1 for each parameter that had a gradient on this rank in this window.
        exchanges: collectives of this window in which ranks exchanged their sets.
    """

    def __init__(self, mine: bytearray, group: BaseGroup) -> None:
        self.mine, self._group = mine, group
        self._exchanged: bytes | None = None
        self._unused_anywhere: list[int] = []
        self.exchanges = 0

    def begin(self) -> None:
        """Begin a window: no parameter is used yet."""
        self.exchanges = 0
        self.mine[:] = bytes(len(self.mine))

    def unused(self, totals: Trailer) -> list[int]:
        """Return the numbers of the parameters that no rank used. Collective; silent unless sets
        changed.
        """
        if totals.flags[USES_ALL]:
            return []
        if totals.flags[USES_CHANGED]:
            self._exchanged = bytes(self.mine)
            counts = torch.tensor(list(self.mine), dtype=torch.int32, device=self._group.device)
            self._group.all_reduce_sum(counts)
            self.exchanges = int(self._group.size > 1)
            self._unused_anywhere = [n for n, count in enumerate(counts.tolist()) if not count]
        return self._unused_anywhere

    def flag(self, trailer: Trailer) -> None:
        """Write into the trailer what the other ranks need for `unused`."""
        trailer.flags[USES_ALL] = int(0 not in self.mine)
        trailer.flags[USES_CHANGED] = int(bytes(self.mine) != self._exchanged)
