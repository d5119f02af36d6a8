"""Flat gradient buffers: layout, accumulation, gradient hooks, used parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter, is_, ne, or_
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from orchestrator.engine.common.trailer import USES_ALL, USES_CHANGED, Trailer
from orchestrator.engine.torch.group import BaseGroup, version_of
from orchestrator.errors import ConfigError, JobError
from orchestrator.plan.wire import bucket_count, trailer_numbers

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Named = Sequence[tuple[str, Tensor]]
"""Parameters with their names."""

Slice = tuple[int, int, int]
"""Part of a buffer: (buffer, start, end), in numbers."""

HALVES = (torch.float16, torch.bfloat16)
"""Dtypes of parameters whose gradients are accumulated and reduced in float32: sums of 256
micro-steps in bfloat16 would be off by a percent or two."""


@dataclass(frozen=True, slots=True)
class GradientSlot:
    """Position of a parameter's gradient: `count` real numbers of buffer `buffer` from `start`."""

    name: str
    parameter: Tensor
    buffer: int
    start: int
    count: int

    def ranges_in(self, slices: Iterable[Slice]) -> Iterator[tuple[int, int]]:
        """Yield start and end in the buffer of its numbers in each slice that holds some."""
        for buffer, start, end in slices:
            first, last = max(start, self.start), min(end, self.start + self.count)
            if buffer == self.buffer and first < last:
                yield first, last

    def view(self, flat: Tensor, start: int | None = None) -> Tensor:
        """Return the parameter's numbers in `flat`, a buffer or a tensor laid out like it, in the
        parameter's shape and strides; from `start` on in any other vector.

        Complex numbers lie there as pairs of reals. The parameter may have another dtype than
        `flat`.
        """
        start, parameter = self.start if start is None else start, self.parameter
        part = flat[start : start + self.count]
        if parameter.is_complex():
            part = torch.view_as_complex(part.view(-1, 2))
        # Fused optimizers want the gradient's strides to be the parameter's.
        if is_dense(parameter):
            return part.as_strided(parameter.size(), parameter.stride(), part.storage_offset())
        return part.view(parameter.shape)


def real_numbers(tensor: Tensor) -> int:
    """Return how many real numbers `tensor` holds: two for each complex one."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def is_dense(tensor: Tensor) -> bool:
    """Return whether its numbers lie in one piece of memory, in any order: an empty_like has its
    strides then.
    """
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def is_expanded(tensor: Tensor) -> bool:
    """Return whether several of its numbers are one in memory, so that nothing can write them."""
    if tensor.layout is not torch.strided:
        return False
    return any(
        size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether it is a DTensor, without importing that."""
    return hasattr(tensor, "_local_tensor")


def shard_like(whole: Tensor, live: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor, sharded as `live`; `whole` if that is no DTensor,
    or has another shape, or if `whole` is in shards already.
    """
    if not is_sharded(live) or whole.shape != live.shape or is_sharded(whole):
        return whole
    from torch.distributed.tensor import distribute_tensor  # takes a second to import

    return distribute_tensor(
        whole.to(live.device), live.device_mesh, live.placements, src_data_rank=None
    )


def as_sharded(view: Tensor, parameter: Tensor) -> Tensor:
    """Return `view` as the gradient of a parameter, which may be a DTensor."""
    if not is_sharded(parameter):
        return view
    from torch.distributed.tensor import DTensor  # takes a second to import

    return DTensor.from_local(
        view,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _parameters_of_buffers(
    parameters: Named, apart: Collection[int]
) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    """Return the numbers of the parameters in each buffer, which are of one device and dtype; those
    `apart` are left out.

    They are in reverse, an order that a backward comes near to, but those of odd sizes come last:
    so all others begin at multiples of 16 numbers, as vectorized kernels want them, although
    nothing is put between them.
    """
    order = reversed(range(len(parameters)))
    members_by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number in sorted(order, key=lambda n: real_numbers(parameters[n][1]) % 16 != 0):
        name, parameter = parameters[number]
        kind = parameter.real.dtype
        # Sums are float32 or float64, which hold a trailer's limbs exactly.
        if kind not in (*HALVES, torch.float32, torch.float64):
            raise JobError(
                f"parameter {name} is {parameter.dtype}; gradients need a floating dtype of 16 "
                "bits or more"
            )
        if number not in apart:
            members_by_kind.setdefault((parameter.device, kind), []).append(number)
    for members in members_by_kind.values():  # pairs of reals have to begin at even places
        members.sort(key=lambda number: not parameters[number][1].is_complex())
    return members_by_kind


def bucket_slices(
    payloads: Sequence[Tensor],
    bucket_bytes: int | None,
    *,
    multiple_of: int = 1,
) -> list[Slice]:
    """Cut each payload into `plan.wire.bucket_count` equal slices.

    Args:
        multiple_of: lengths of slices are multiples of this, as those of payloads are.

    Raises:
        ConfigError: a bucket is too small to hold one number.
    """
    slices: list[Slice] = []
    for number, payload in enumerate(payloads):
        size = payload.element_size()
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


# ------------------------------------------------------------------ Gradient buffers
# In a window every `.grad` is a view into a flat buffer, and autograd adds to it in place. So
# nothing is copied together to be reduced. The trailer's numbers end the last buffer.
#
# Large parameters begin with a `.grad` of None, and their first gradient is copied into the view:
# to begin with zeros, buffers would be written and read once more.
#
# Only a backward may write gradients. Each view has its own count of in-place writes (torch's
# version), which grows by one for each gradient that is added; hooks count the same. Any other
# write, and any other tensor in `.grad`, is found at the next check and refused.


_GRADIENT = attrgetter("grad")
_WORTH_COPYING = 8192
"""Numbers of a parameter, on average, from which on copying first gradients saves time: a copy
takes about 2 microseconds of Python."""


class GradientBuffers:
    """The buffers of one model, and the gradients as views into them.

    Args:
        parameters: the trained ones, each once; of DTensors this rank's parts count.
        metric_count: metrics that the trailer carries; None for no trailer at all.
        pad_to: each buffer is allocated in multiples of this; the padding is never reduced as
            gradient, and zero in a window.
        move_weights: also move the parameters into flat buffers, `weights`, and make them views.
        together: numbers of parameters that lie in a buffer of their own, in this order and without
            padding; these buffers come last.

    Attributes:
        weights: the parameters' own numbers in the same layout, where they were moved.
        flats: the buffers, padding included. The trailer ends the payload of the last one.
        payloads: their meaningful parts: gradients, in the last one the trailer as well.
        flat_grads: their gradients alone.
        shared: how many buffers there are before those of `together`.
        parameters, slots, views: one for each, in the order of `parameters`.
        trailer: the trailer's numbers.
        hook_counts: of each view the version at the window's start, plus one for each gradient that
            a hook has seen since: its version now, if only backwards wrote to it.
        at_begin: of each view the version at the window's start.
        targets: of each parameter the view that its gradients go to, and the same as `.grad`.
        used: 1 for each parameter that got a gradient, as of the latest `complete`.
        attached: every `.grad` was its view, as of the latest `begin` or `check_attached`.
    """

    def __init__(
        self,
        parameters: Named,
        *,
        metric_count: int | None = None,
        pad_to: int = 1,
        move_weights: bool = False,
        together: Sequence[Sequence[int]] = (),
    ) -> None:
        trailer = 0 if metric_count is None else trailer_numbers(metric_count)
        local = [(name, local_part(parameter)) for name, parameter in parameters]
        apart = {number for members in together for number in members}
        numbers_in = list(_parameters_of_buffers(local, apart).items())
        self.shared = len(numbers_in)
        for members in together:
            first = local[members[0]][1]
            numbers_in.append(((first.device, first.real.dtype), list(members)))
        self.flats: list[Tensor] = []
        self.weights: list[Tensor] = []
        self._ends: list[tuple[int, int]] = []  # of each one's gradients, and of its payload
        slots: dict[int, GradientSlot] = {}
        for buffer, ((device, kind), members) in enumerate(numbers_in):
            start = 0
            for number in members:
                name, parameter = local[number]
                count = real_numbers(parameter)
                slots[number] = GradientSlot(name, parameter, buffer, start, count)
                start += count
            length = start + (trailer if buffer == len(numbers_in) - 1 else 0)
            self._ends.append((start, length))
            if buffer < self.shared:
                length = -(-length // pad_to) * pad_to
            if move_weights:  # first, so that the old ones are freed before gradients take memory
                weights = torch.zeros(length, dtype=kind, device=device)
                for number in members:
                    view, parameter = slots[number].view(weights), slots[number].parameter
                    view.copy_(parameter.detach())
                    parameter.data = view
                self.weights.append(weights)
            dtype = torch.float32 if kind in HALVES else kind
            # `begin` zeroes what nothing else writes, so that memory is not taken before its use.
            self.flats.append(torch.empty(length, dtype=dtype, device=device))
        self.slots = [slots[number] for number in range(len(parameters))]
        self.parameters = [parameter for _, parameter in parameters]
        self._cut_flats()
        self.hook_counts = [0] * len(parameters)
        self.used = bytearray(len(parameters))
        self.at_begin = [-1] * len(parameters)  # no window has begun
        self.targets = list(zip(self.views, self._grads, strict=True))
        self.attached = False
        numbers = sum(slot.count for slot in self.slots)
        self._copies_first = numbers >= _WORTH_COPYING * len(parameters)
        # With copies, gradients are written by them or by `complete`, but padding is not.
        self._zeroed_from = [end if self._copies_first else 0 for end, _ in self._ends]
        self._narrow = [n for n, (_, slot) in enumerate(local) if slot.real.dtype in HALVES]
        for number in self._narrow:
            self.parameters[number].grad_dtype = None  # any: a backward's is added to float32

    def _cut_flats(self) -> None:
        ends = list(zip(self.flats, self._ends, strict=True))
        self.payloads = [flat[:end] for flat, (_, end) in ends]
        self.flat_grads = [flat[:end] for flat, (end, _) in ends]
        self.trailer = self.payloads[-1][self._ends[-1][0] :]
        # A view by `.data` has a version of its own, which writing in the flat buffer leaves alone.
        self.views = [slot.view(self.flats[slot.buffer]).data for slot in self.slots]
        self._grads = list(map(as_sharded, self.views, self.parameters))
        self._addresses = [view.data_ptr() for view in self.views]

    def clone_layout(self) -> GradientBuffers:
        """Return further buffers of the same layout. `hook_counts`, `at_begin`, `targets` and
        `used` are shared, since gradients go to one set of buffers at a time.
        """
        other = copy.copy(self)
        other.flats = list(map(torch.empty_like, self.flats))
        other._cut_flats()  # noqa: SLF001  # ours
        return other

    def begin(self) -> None:
        """Begin a window or a leaf: nothing was added yet, and gradients go here."""
        for flat, start in zip(self.flats, self._zeroed_from, strict=True):
            flat[start:].zero_()
        self.at_begin[:] = map(version_of, self.views)
        self.hook_counts[:] = self.at_begin
        self.targets[:] = zip(self.views, self._grads, strict=True)
        self.attached = not self._copies_first
        if self._copies_first:
            for parameter in self.parameters:
                parameter.grad = None
        else:
            self.attach()

    def attach(self) -> None:
        """Set every `.grad` to its view of the buffers."""
        for parameter, gradient in zip(self.parameters, self._grads, strict=True):
            parameter.grad = gradient

    def check_attached(self) -> None:
        """Check that the next backward adds to the buffers, and set `attached`.

        A `.grad` of None (after `zero_grad(set_to_none=True)`) takes nothing away from what was
        accumulated; what another code's backward put in its place is added.

        Raises:
            JobError: something else put another tensor there.
        """
        self.attached = all(map(is_, map(_GRADIENT, self.parameters), self._grads))
        if self.attached:
            return
        for number, parameter in enumerate(self.parameters):
            gradient, view = parameter.grad, self.views[number]
            if gradient is self._grads[number] or (gradient is None and self._is_unused(number)):
                continue
            if gradient is not None:
                if gradient.requires_grad or self.hook_counts[number] == version_of(view):
                    raise self._foreign_write(number)
                view.add_(local_part(gradient))
                self.hook_counts[number] = version_of(view)
            parameter.grad = self._grads[number]

    def check(self) -> None:
        """Check that only backwards wrote gradients since the window began.

        Raises:
            JobError: something else wrote there.
        """
        self.check_attached()
        if list(map(version_of, self.views)) != self.hook_counts:
            versions = zip(self.views, self.hook_counts, strict=True)
            raise self._foreign_write(
                next(n for n, (v, due) in enumerate(versions) if version_of(v) != due)
            )

    def complete(self) -> None:
        """Check once more at the end of a window or a leaf, note which parameters were used, and
        set the gradients of the others to zero.

        Raises:
            JobError: something else than a backward wrote gradients.
        """
        self.check()
        addresses = list(map(Tensor.data_ptr, self.views))
        if addresses != self._addresses:
            raise self._foreign_write(
                next(n for n, now in enumerate(addresses) if now != self._addresses[n])
            )
        used = bytes(map(ne, self.hook_counts, self.at_begin))
        self.used[:] = bytes(map(or_, self.used, used))
        if 0 in used:
            for number in (number for number, is_used in enumerate(used) if not is_used):
                self.views[number].zero_()
                self.at_begin[number] = self.hook_counts[number] = version_of(self.views[number])
                self.parameters[number].grad = self._grads[number]

    def _is_unused(self, number: int) -> bool:
        return self.hook_counts[number] == self.at_begin[number]

    def _foreign_write(self, number: int) -> JobError:
        name, gradient = self.slots[number].name, self.parameters[number].grad
        if gradient is not None and gradient.requires_grad:
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

    @contextmanager
    def stepping(self, unused: Iterable[int]) -> Generator[None]:
        """Let the optimizer step in here: `.grad` of `unused` is None, so it leaves them alone.

        It sees gradients of its parameters' dtype, rounded once from the sum.
        """
        for number in self._narrow:
            self.parameters[number].grad = self._grads[number].to(self.parameters[number].dtype)
        for number in unused:
            self.parameters[number].grad = None
        yield
        self.attach()

    @contextmanager
    def preserved(self) -> Generator[None]:
        """Restore afterwards what counts and directs gradients, which go to buffers of
        `clone_layout` meanwhile.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        shared: list[Any] = [self.hook_counts, self.at_begin, self.targets, self.used]
        before = [values[:] for values in shared]
        try:
            yield
        finally:
            for values, earlier in zip(shared, before, strict=True):
                values[:] = earlier  # in place: hooks and copies of this layout have them, too
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient

    def release(self) -> None:
        """Let the parameters' gradients be of their own dtype again."""
        for number in self._narrow:
            self.parameters[number].grad = None
            self.parameters[number].grad_dtype = self.parameters[number].dtype

    def non_finite(self) -> list[str]:
        """Return the parameters whose gradient holds NaN or infinity. Not collective."""
        return [
            slot.name
            for slot, view in zip(self.slots, self.views, strict=True)
            if not bool(torch.isfinite(view).all())
        ]


# ------------------------------------------------------------------ Gradient hooks
# Hooks take most of what an accumulator costs in a micro-step, since they run Python once for each
# parameter. So they are one function, whose code and variables stay in the processor's caches, and
# it only notes the parameter, unless something waits for the gradient.


class GradHooks:
    """The gradient hooks of one accumulator's parameters. They keep no accumulator alive.

    Args:
        parameters: the trained ones.
        buffers: `hook_counts` grows by one for each gradient; a first one is moved to `targets`.
        on_undeclared: called with a parameter's number for each gradient of a backward that is not
            the accumulator's.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        buffers: GradientBuffers,
        on_undeclared: Callable[[int], None],
    ) -> None:
        self._counts, self._at_begin = buffers.hook_counts, buffers.at_begin
        self._targets = buffers.targets
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._on_gradient: Callable[[int], None] | None = on_undeclared
        self._on_undeclared = on_undeclared
        self._first = parameters[0]
        self._together = False  # count at the end of the backward
        self._arrived: list[Tensor] = []
        # The nodes that accumulate gradients stay the same ones, and with them the stream of a GPU
        # that they run on: a bucket is sent from the one of its last gradient.
        self._nodes = [get_gradient_edge(p).node for p in parameters if not is_sharded(p)]
        note = self._arrived.append

        def arrive(parameter: Tensor) -> None:
            if self._together:
                note(parameter)
            else:
                self._count(parameter)

        self._handles = [p.register_post_accumulate_grad_hook(arrive) for p in parameters]

    def begin_backward(self, on_gradient: Callable[[int], None] | None, *, attached: bool) -> None:
        """Begin a backward of the accumulator.

        Args:
            on_gradient: called with the parameter's number for each gradient that has come.
            attached: autograd adds in the buffers, so no first gradient has to be moved there.

        Raises:
            JobError: a CUDA graph captures it.
        """
        if self._first.is_cuda and torch.cuda.is_current_stream_capturing():
            raise _captured()
        self._on_gradient, self._together = on_gradient, on_gradient is None and attached

    def end_backward(self) -> None:
        """End a backward of the accumulator, which may have failed."""
        counts = self._counts
        for number in map(self._numbers.__getitem__, map(id, self._arrived)):
            counts[number] += 1
        self._arrived.clear()
        self._on_gradient, self._together = self._on_undeclared, False

    def _count(self, parameter: Tensor) -> None:
        number = self._numbers[id(parameter)]
        if self._counts[number] == self._at_begin[number]:
            _move_first(parameter, *self._targets[number])
        self._counts[number] += 1
        if self._on_gradient is not None:
            self._on_gradient(number)

    def remove(self) -> None:
        """Remove the hooks, so that another accumulator may register its own."""
        for handle in self._handles:
            handle.remove()
        self._nodes.clear()  # they keep the parameters alive


def _captured() -> JobError:
    return JobError(
        "a backward was captured in a CUDA graph, whose replays run no hook: its gradients "
        "would not count. Run the backward outside of the capture; torch.compile and "
        "torch.cuda.make_graphed_callables() can be used"
    )


def _move_first(parameter: Tensor, view: Tensor, as_gradient: Tensor) -> None:
    """Move a parameter's first gradient in a window into its view, with one write there."""
    if parameter.is_cuda and torch.cuda.is_current_stream_capturing():
        raise _captured()
    gradient = parameter.grad
    # One that carries a graph is refused by the next `check`.
    if gradient is None or gradient is as_gradient or gradient.requires_grad:
        return
    new = gradient if view is as_gradient else local_part(gradient)
    if new.is_sparse:
        view.data.zero_()  # which the view's version does not count
        view.add_(new)
    else:
        view.copy_(new)
    parameter.grad = as_gradient


# ------------------------------------------------------------------ Unused parameters
# One process would leave the `.grad` of an unused parameter None, so that weight decay and
# momentum do not touch it. To do the same, ranks have to agree, and two flags of the trailer
# nearly always suffice: some rank used every parameter, or no rank's set changed since the last
# exchange. Only when both fail do ranks exchange the sets, with one small all-reduce.


class UsedParameters:
    """The sets of used parameters of one rank and, by agreement, of all.

    Attributes:
        own: 1 for each parameter that had a gradient on this rank in this window.
        exchanges: collectives of the latest window in which ranks exchanged their sets.
    """

    def __init__(self, own: bytearray, group: BaseGroup) -> None:
        self.own, self._group = own, group
        self._exchanged: bytes | None = None
        self._unused_anywhere: list[int] = []
        self.exchanges = 0

    def flag(self, trailer: Trailer) -> None:
        """Write into the trailer what the other ranks need for `unused`."""
        self.exchanges = 0
        trailer.flags[USES_ALL] = int(0 not in self.own)
        trailer.flags[USES_CHANGED] = int(bytes(self.own) != self._exchanged)

    def unused(self, totals: Trailer) -> list[int]:
        """Return the numbers of the parameters that no rank used. Collective; silent unless sets
        changed.
        """
        if totals.flags[USES_ALL]:
            return []
        if totals.flags[USES_CHANGED]:
            self._exchanged = bytes(self.own)
            counts = torch.tensor(list(self.own), dtype=torch.int32, device=self._group.device)
            self._group.all_reduce_sum(counts)
            self.exchanges = int(self._group.size > 1)
            self._unused_anywhere = [n for n, count in enumerate(counts.tolist()) if not count]
        return self._unused_anywhere
