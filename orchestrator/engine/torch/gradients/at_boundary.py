"""How local gradients become the sum over ranks: at the boundary.

A reduction is told of every micro-step, and at the end gives the totals that all ranks share; the
summed gradient is then in `buffers`. Two more ways are in
`reproducible.py` and `sharding/reduction.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from orchestrator.engine.common.boundary.packed_sums import Trailer, limb_bits
from orchestrator.engine.torch.comm.base_group import BaseGroup
from orchestrator.engine.torch.gradients.bucket_sender import BucketSender
from orchestrator.engine.torch.gradients.buffer import GradientBuffers


class Reduction(Protocol):
    """What an accumulator needs of a reduction."""

    @property
    def buffers(self) -> GradientBuffers:
        """Where gradients are accumulated now, and the sum is after `finish`."""
        ...

    @property
    def buffers_made(self) -> int:
        """How many sets of buffers there are."""
        ...

    @property
    def records(self) -> bool:
        """Whether gradients of backwards that somebody else runs can be taken in."""
        ...

    def begin(self, *, leaves: int | None) -> None:
        """Begin a window, of `leaves` leaves over all ranks."""
        ...

    def before_backward(self, *, last: bool, leaf: int | None) -> bool:
        """A backward comes. `last`: of this rank in this window. `leaf`: its global number.

        Gives whether `ready` has to be called in it.
        """
        ...

    def after_backward(self) -> None:
        """It is done."""
        ...

    def ready(self, parameter: int) -> None:
        """One parameter's gradient is there, in mid-backward."""
        ...

    def finish(self, trailer: Trailer, arrived: Callable[[Tensor], None]) -> Trailer:
        """Sum over ranks. Collective. Gives the ranks' trailers added up.

        `arrived` is called with flat pieces whose norm is the gradient's: the summed gradient as
        it comes, say, each number once.
        """
        ...


_MANTISSA_BITS = {torch.float32: 24, torch.float64: 53}


def write_trailer(buffers: GradientBuffers, trailer: Trailer, ranks: int) -> None:
    """Put this rank's numbers behind its gradients."""
    place = buffers.trailer
    numbers = trailer.numbers(limb_bits(_MANTISSA_BITS[place.dtype], ranks))
    place.copy_(torch.tensor(numbers, dtype=place.dtype))


def read_trailer(buffers: GradientBuffers, ranks: int) -> Trailer:
    """The numbers behind the gradients, as a trailer."""
    place = buffers.trailer
    bits = limb_bits(_MANTISSA_BITS[place.dtype], ranks)
    return Trailer.of(place.tolist(), buffers.metric_count or 0, bits)


class AtBoundary:
    """One reduction for each window, its buckets sent during the last backward.

    Args:
        overlap: False sends everything at the boundary.
    """

    def __init__(
        self,
        buffers: GradientBuffers,
        group: BaseGroup,
        sender: BucketSender,
        *,
        overlap: bool = True,
    ) -> None:
        self._buffers, self._group, self._overlap = buffers, group, overlap
        self._sender = sender

    @property
    def buffers(self) -> GradientBuffers:
        """The one set of buffers that there is."""
        return self._buffers

    @property
    def buffers_made(self) -> int:
        """One."""
        return 1

    @property
    def records(self) -> bool:
        """They only have to be in the buffers."""
        return True

    def begin(self, *, leaves: int | None) -> None:
        """Start from nothing."""
        del leaves
        if self._sender.started:
            raise RuntimeError(
                "a window begins while another one's gradients are on their way: after an error in "
                "the last backward this rank has to end, since the others wait for it"
            )
        self._buffers.begin()

    def before_backward(self, *, last: bool, leaf: int | None) -> bool:
        """Send during this backward if it is the last."""
        del leaf
        return last and self._overlap and self._sender.arm()

    def after_backward(self) -> None:
        """Nothing: buckets that are not ready leave at the boundary."""

    def ready(self, parameter: int) -> None:
        """Send the buckets that this one completes."""
        self._sender.ready(parameter)

    def finish(self, trailer: Trailer, arrived: Callable[[Tensor], None]) -> Trailer:
        """Send the rest, wait for all."""
        self._buffers.complete()
        write_trailer(self._buffers, trailer, self._group.size)
        self._sender.send_rest()
        self._sender.wait(arrived)
        return read_trailer(self._buffers, self._group.size)
