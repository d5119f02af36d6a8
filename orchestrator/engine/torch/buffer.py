"""Permanent flat gradient buffers: every parameter's `.grad` is a view into one of them.

One buffer for each device and real dtype; complex parameters live in their real dtype's buffer.
Within one, parameters lie in the order in which their gradients become ready (the reverse of the
model's), so that buckets, which are plain slices, fill up one after the other during a backward.
The trailer's numbers end the last buffer. Nothing is ever copied together to be reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Module

from orchestrator.errors import ConfigError, JobError
from orchestrator.plan.wire import trailer_numbers

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
class _Plan:
    """One buffer in the making."""

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


class GradientBuffers:
    """The buffers of one model, and the gradients as views into them.

    Args:
        parameters: what `trained` gives.
        metric_count: metrics that the trailer carries; None for no trailer at all.
        pad_to: each buffer is allocated in multiples of this; the padding is never reduced as
            gradient and stays zero.

    Attributes:
        flats: the buffers, padding included. The trailer ends the payload of the last one.
        payloads: their meaningful parts: gradients, in the last one the trailer as well.
        gradients: their gradients alone.
        views: one for each parameter, in the order of `parameters`.
        trailer: the trailer's numbers.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor]],
        *,
        metric_count: int | None = 0,
        pad_to: int = 1,
    ) -> None:
        self.metric_count, self.pad_to = metric_count, pad_to
        self.parameters = list(parameters)
        trailer = 0 if metric_count is None else trailer_numbers(metric_count)
        plans = _plans(self.parameters, trailer=trailer > 0)
        self.flats: list[Tensor] = []
        self.payloads: list[Tensor] = []
        self.gradients: list[Tensor] = []
        place_of: dict[int, Place] = {}
        for number, plan in enumerate(plans):
            start = 0
            for name, parameter in plan.members:
                count = real_numbers(parameter)
                place_of[id(parameter)] = Place(name, parameter, number, start, count)
                start += count
            last = number == len(plans) - 1
            length = start + (trailer if last else 0)
            padded = -(-length // pad_to) * pad_to
            flat = torch.zeros(padded, dtype=plan.dtype, device=plan.device)
            self.flats.append(flat)
            self.payloads.append(flat[:length])
            self.gradients.append(flat[:start])
        self.trailer = self.payloads[-1][self.gradients[-1].numel() :]
        self.places = [place_of[id(parameter)] for _, parameter in self.parameters]
        self.views = [_view(self.flats[place.buffer], place) for place in self.places]

    def another(self) -> GradientBuffers:
        """Further buffers of the same layout, zero."""
        return GradientBuffers(self.parameters, metric_count=self.metric_count, pad_to=self.pad_to)

    def zero(self) -> None:
        """Set gradients and trailer to zero."""
        for flat in self.flats:
            flat.zero_()

    def attach(self, *, fresh: bool = False) -> None:
        """Make every `parameter.grad` a view into the buffers, whatever was done to it meanwhile.

        A `.grad` of None (after `zero_grad(set_to_none=True)`) takes nothing away from what was
        accumulated; one that somebody put in its place is added to it.

        Args:
            fresh: drop what was put in place instead: a window begins.

        Raises:
            JobError: a backward with `create_graph=True` replaced one, old sum included.
        """
        for (name, parameter), view in zip(self.parameters, self.views, strict=True):
            found = parameter.grad
            if found is view:
                continue
            if found is not None and not fresh:
                if found.requires_grad:
                    raise JobError(
                        f"the gradient of {name} carries a graph: accumulate by plain backward(); "
                        "for gradient penalties use torch.autograd.grad(..., create_graph=True)"
                    )
                view.add_(found)
            parameter.grad = view

    def detach(self, unused: Iterable[int]) -> None:
        """Set `.grad` of these parameters to None, so that the optimizer leaves them alone."""
        for number in unused:
            self.parameters[number][1].grad = None

    def numbers(self) -> int:
        """Real numbers of all gradients."""
        return sum(gradient.numel() for gradient in self.gradients)


def _plans(parameters: Sequence[tuple[str, Tensor]], *, trailer: bool) -> list[_Plan]:
    plans: dict[tuple[torch.device, torch.dtype], _Plan] = {}
    for name, parameter in reversed(parameters):
        if not (parameter.is_floating_point() or parameter.is_complex()):
            raise JobError(
                f"parameter {name} is {parameter.dtype}; gradients need a floating dtype"
            )
        dtype = parameter.real.dtype if parameter.is_complex() else parameter.dtype
        key = (parameter.device, dtype)
        plans.setdefault(key, _Plan(*key)).members.append((name, parameter))
    for plan in plans.values():  # pairs of reals have to begin at even places
        plan.members.sort(key=lambda member: not member[1].is_complex())
    # The trailer's buffer comes last, because the trailer is what is known last.
    ordered = sorted(plans.values(), key=lambda plan: plan.dtype in _EXACT)
    if trailer and ordered[-1].dtype not in _EXACT:
        ordered.append(_Plan(ordered[-1].device, torch.float32))
    return ordered


def _view(flat: Tensor, place: Place) -> Tensor:
    parameter = place.parameter
    part = flat[place.start : place.start + place.count]
    if parameter.is_complex():
        part = torch.view_as_complex(part.view(-1, 2))
    # Fused optimizers want the gradient's strides to be the parameter's. They can be where the
    # parameter is dense, which is where an empty_like has its strides.
    if torch.empty_like(parameter, device="meta").stride() == parameter.stride():
        return part.as_strided(parameter.size(), parameter.stride(), part.storage_offset())
    return part.view(parameter.shape)


def bucket_slices(payloads: Sequence[Tensor], bucket_bytes: int) -> list[tuple[int, int, int]]:
    """Cut each payload into `ceil(bytes / bucket_bytes)` slices: (buffer, start, end) in numbers.

    Raises:
        ConfigError: a bucket is too small to hold one number.
    """
    slices: list[tuple[int, int, int]] = []
    for number, payload in enumerate(payloads):
        size = payload.element_size()
        if bucket_bytes < size:
            raise ConfigError(
                f"a bucket of {bucket_bytes} bytes holds no number of {payload.dtype}; "
                f"engine.bucket_mib must be at least {size / 2**20:.3g}"
            )
        count = -(-payload.numel() * size // bucket_bytes)
        ends = [bucket * bucket_bytes // size for bucket in range(1, count)] + [payload.numel()]
        slices += [
            (number, start, end)
            for start, end in zip([0, *ends], ends, strict=False)
            if end > start
        ]
    return slices
