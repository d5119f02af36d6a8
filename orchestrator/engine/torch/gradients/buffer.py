"""Permanent flat gradient buffers: every parameter's `.grad` becomes a view into one of them.

A window begins with every `.grad` None, and the gradients of its first backward are copied into
their places as they come; autograd adds all later ones there itself. So no time goes into zeros,
and nothing is ever copied together to be reduced. The trailer's numbers end the last buffer.

Only a backward may write gradients. A view has a count of its own of what wrote in it (torch's
version), which grows by one for each gradient that is added; what else wrote there, or put another
tensor in `.grad`'s place, is found at the next look, and refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter, is_

import torch
from torch import Tensor

from orchestrator.engine.torch.comm.tensors import bytes_of, writes_of
from orchestrator.engine.torch.gradients.layout import Place, buffer_plans, real_numbers
from orchestrator.errors import JobError
from orchestrator.plan.wire import trailer_numbers

_GRADIENT = attrgetter("grad")


class GradientBuffers:
    """The buffers of one model, and the gradients as views into them.

    Args:
        parameters: what `trained` gives.
        metric_count: metrics that the trailer carries; None for no trailer at all.
        pad_to: each buffer is allocated in multiples of this; the padding is never reduced as
            gradient and stays zero.
        order: see `buffer_plans`.

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
    ) -> None:
        self.metric_count, self.pad_to, self.order = metric_count, pad_to, order
        self.parameters = list(parameters)
        trailer = 0 if metric_count is None else trailer_numbers(metric_count)
        plans = buffer_plans(self.parameters, trailer=trailer > 0, order=order)
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
        # A view by `.data` has a version of its own, which writing in the flat buffer leaves alone.
        self.views = [
            view_of(self.flats[place.buffer], place, place.start).data for place in self.places
        ]
        self._tensors = [parameter for _, parameter in self.parameters]
        self._addresses = [view.data_ptr() for view in self.views]
        self.versions = [0] * len(self.views)
        self._here = bytearray(len(self.places))  # 1 where a gradient is in its place
        self._looked = False  # in this backward, what is in no view's place was None before it

    def another(self) -> GradientBuffers:
        """Further buffers of the same layout, zero."""
        return GradientBuffers(
            self.parameters, metric_count=self.metric_count, pad_to=self.pad_to, order=self.order
        )

    def begin(self) -> None:
        """A window, or a leaf, begins: every `.grad` is None; trailer and padding are zero."""
        self._here[:] = bytes(len(self._here))
        for flat, gradient in zip(self.flats, self.gradients, strict=True):
            flat[gradient.numel() :].zero_()
        for parameter in self._tensors:
            parameter.grad = None
        self.versions[:], self._looked = map(writes_of, self.views), False

    @property
    def begun(self) -> bool:
        """A backward has brought gradients since `begin`; later ones add where those are."""
        return 1 in self._here

    def expect(self) -> None:
        """Before a backward: every `.grad` is its view, or None.

        A `.grad` of None (after `zero_grad(set_to_none=True)`) takes nothing away from what was
        accumulated.

        Raises:
            JobError: somebody put something else there.
        """
        before = map(_GRADIENT, self._tensors)
        if not all(map(is_, before, self.views if self.begun else repeat(None))):
            for number, (parameter, view) in enumerate(zip(self._tensors, self.views, strict=True)):
                if parameter.grad is not None and parameter.grad is not view:
                    raise self._strange(number)
        self._looked = True

    def take(self, number: int) -> None:
        """A backward has added to parameter `number`'s gradient: have it in its place.

        The window's first is copied there; one that found `.grad` to be None later is added; what
        autograd added in place is there already.

        Raises:
            JobError: something else wrote there.
        """
        parameter, view = self._tensors[number], self.views[number]
        found = parameter.grad
        if found is view:
            version = writes_of(view)
            if version != self.versions[number] + 1 or not self._here[number]:
                raise self._strange(number)
            self.versions[number] = version
            return
        if found is None:
            raise JobError(
                f"the gradient of {self.parameters[number][0]} was taken away within the backward "
                "that made it, by a register_post_accumulate_grad_hook() perhaps: an optimizer "
                "cannot step there, as the update is made at the boundary"
            )
        if found.requires_grad:
            return  # `settle` refuses it, where it can be told
        if not self._here[number]:
            if found.is_sparse:
                view.zero_().add_(found)
            else:
                view.copy_(found)
        elif self._looked:
            view.add_(found)
        else:
            raise self._strange(number)
        self._here[number] = 1
        self.versions[number] = writes_of(view)
        parameter.grad = view

    def settle(self) -> list[int]:
        """After a backward: every gradient that came is in its place, and nothing else was written.

        Returns:
            The parameters whose gradients were put there now: they came in a backward that was
            only counted, and had none before.

        Raises:
            JobError: one is not a backward's, or a backward with `create_graph=True` replaced it.
        """
        late: list[int] = []
        if not all(map(is_, map(_GRADIENT, self._tensors), self.views)):
            for number, (parameter, view) in enumerate(zip(self._tensors, self.views, strict=True)):
                found = parameter.grad
                came = self.versions[number] > writes_of(view)
                if found is view or (found is None and not (came or self._here[number])):
                    continue
                if found is None and not came:
                    parameter.grad = view
                    continue
                if not came or (found is not None and found.requires_grad):
                    raise self._strange(number)
                self.take(number)
                late.append(number)
        self._looked = False
        if list(map(writes_of, self.views)) != self.versions:
            self.verify()
        return late

    def verify(self) -> None:
        """Raise `JobError` unless the last to write in each view was a backward."""
        versions = list(map(writes_of, self.views))
        addresses = [view.data_ptr() for view in self.views]
        if versions != self.versions or addresses != self._addresses:
            now = zip(versions, addresses, strict=True)
            before = zip(self.versions, self._addresses, strict=True)
            raise self._strange(
                next(n for n, (a, b) in enumerate(zip(now, before, strict=True)) if a != b)
            )

    def complete(self) -> None:
        """`settle`, and zeros for parameters without a gradient: the buffers can be summed up."""
        self.settle()
        self.verify()
        if 0 in self._here:
            for number, view in enumerate(self.views):
                if not self._here[number]:
                    view.zero_()
                    self.versions[number] = writes_of(view)
            self.attach()

    def _strange(self, number: int) -> JobError:
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
        self._here[:] = bytes([1]) * len(self._here)
        if not all(map(is_, map(_GRADIENT, self._tensors), self.views)):
            for parameter, view in zip(self._tensors, self.views, strict=True):
                parameter.grad = view

    def detach(self, unused: Iterable[int]) -> None:
        """Set `.grad` of these parameters to None, so that the optimizer leaves them alone."""
        for number in unused:
            self.parameters[number][1].grad = None

    def non_finite(self) -> list[str]:
        """Names of the parameters whose gradient holds NaN or infinity. Not collective."""
        return [
            name
            for (name, _), view in zip(self.parameters, self.views, strict=True)
            if not bool(torch.isfinite(view).all())
        ]

    def bytes_of_all(self) -> int:
        """Memory of the buffers, trailer and padding included."""
        return sum(bytes_of(flat) for flat in self.flats)

    def numbers(self) -> int:
        """Real numbers of all gradients."""
        return sum(gradient.numel() for gradient in self.gradients)


def view_of(flat: Tensor, place: Place, start: int = 0) -> Tensor:
    """The numbers of `flat` from `start` on, in the shape and strides of the parameter at `place`.

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
