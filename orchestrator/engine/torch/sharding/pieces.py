"""One rank's share of the optimizer: its pieces of the weights, their gradients, their state.

Parameters move into flat buffers with the gradient's layout and become views of them, so that a
bucket of weights is one slice, as a bucket of the gradient is. Rank r owns segment r of each
bucket. What of a parameter lies in its segments are its pieces; they take the parameter's place in
the optimizer, which thus keeps state for 1/R of the model, and steps 1/R of it.

    [Rajbhandari et al. 2020, ZeRO, stage 1 and the gradient's half of stage 2, arXiv 1910.02054]
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from orchestrator.engine.torch.comm.base_group import BaseGroup
from orchestrator.engine.torch.gradients.buffer import GradientBuffers, view_of
from orchestrator.engine.torch.gradients.layout import segment_of
from orchestrator.errors import JobError


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A parameter's numbers from `start` on, n of them.

    Attributes:
        weight: shape (n), a leaf that shares the parameter's memory.
        gradient: shape (n), in the flat gradient.
    """

    start: int
    weight: Tensor
    gradient: Tensor


class OptimizerShard:
    """See the module. Takes the place of `GradientBuffers` where an optimizer steps.

    Args:
        optimizer: one that `check_shardable` lets pass; from now on it holds pieces.
        buffers: the gradient, padded to a multiple of the ranks.
        group: the ranks, two or more.
        buckets: slices of the buffers, as (buffer, start, end); R equal segments each.

    Attributes:
        pieces: this rank's, for each of the trained parameters; none for many of them.
        groups: the numbers of the parameters in each of the optimizer's groups, None for those that
            are not trained: as they were before pieces took their place.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        buffers: GradientBuffers,
        group: BaseGroup,
        buckets: Sequence[tuple[int, int, int]],
    ) -> None:
        self.optimizer, self.buffers, self.group, self.buckets = optimizer, buffers, group, buckets
        owned = [segment_of(bucket, group.rank, group.size) for bucket in buckets]
        self._gradients = [buffers.gradients[buffer][start:end] for buffer, start, end in owned]
        weights = _moved(buffers)
        self._addresses = [place.parameter.data_ptr() for place in buffers.places]
        self._weights = [weights[buffer][start:end] for buffer, start, end in buckets]
        self.pieces = _pieces(buffers, weights, owned)
        self._whole = [list(g["params"]) for g in optimizer.param_groups]
        numbers = {id(place.parameter): number for number, place in enumerate(buffers.places)}
        self.groups = [[numbers.get(id(p)) for p in g["params"]] for g in optimizer.param_groups]
        for g, mine in zip(optimizer.param_groups, self.groups, strict=True):
            pieces = (piece for n in mine if n is not None for piece in self.pieces[n])
            g["params"] = [piece.weight for piece in pieces]
        self._loads = False
        self._guards = _refuse_parts(self, optimizer)

    @property
    def loads(self) -> bool:
        """Whether this rank's part of a whole state is being loaded."""
        return self._loads

    @contextmanager
    def loading(self) -> Generator[None]:
        """Let the optimizer take this rank's part of a whole state meanwhile."""
        self._loads = True
        try:
            yield
        finally:
            self._loads = False

    @property
    def gradients(self) -> Sequence[Tensor]:
        """This rank's segments of the summed gradient, flat, padding left out."""
        return self._gradients

    def detach(self, unused: Iterable[int]) -> None:
        """Let the optimizer step on all pieces but those of these parameters.

        Raises:
            JobError: a parameter is no longer where its pieces are.
        """
        for place, address in zip(self.buffers.places, self._addresses, strict=True):
            if place.parameter.data_ptr() != address:
                raise JobError(
                    f"parameter {place.name} was given other memory after the accumulator was "
                    "built, by model.to(...) say; with engine.shard_optimizer=true it has to stay"
                )
        left_alone = set(unused)
        for number, pieces in enumerate(self.pieces):
            for piece in pieces:
                piece.weight.grad = None if number in left_alone else piece.gradient

    def attach(self) -> None:
        """After the step every `.grad` is None: no rank has all of the gradient to show."""
        for place, pieces in zip(self.buffers.places, self.pieces, strict=True):
            place.parameter.grad = None
            for piece in pieces:
                piece.weight.grad = None

    def non_finite(self) -> list[str]:
        """Names of the parameters whose gradient holds NaN or infinity. Collective."""
        mine = [
            sum(not bool(torch.isfinite(piece.gradient).all()) for piece in pieces)
            for pieces in self.pieces
        ]
        counts = torch.tensor(mine, dtype=torch.int32, device=self.group.device)
        self.group.all_reduce_sum(counts)
        return [self.buffers.places[n].name for n, count in enumerate(counts.tolist()) if count]

    def spread(self) -> None:
        """Give every rank the weights that their owners have stepped. Collective."""
        for work in [self.group.gather_in_place_async(bucket) for bucket in self._weights]:
            work.wait()

    def release(self) -> None:
        """Let the optimizer have whole parameters again, without any state."""
        for guard in self._guards:
            guard.remove()
        for group, parameters in zip(self.optimizer.param_groups, self._whole, strict=True):
            group["params"] = parameters
        self.optimizer.state.clear()


def _moved(buffers: GradientBuffers) -> list[Tensor]:
    """The parameters' new memory: flat, laid out as the gradient, padding zero."""
    flats = [torch.zeros_like(flat) for flat in buffers.flats]
    for place in buffers.places:
        view = view_of(flats[place.buffer], place, place.start)
        view.copy_(place.parameter.detach())
        place.parameter.data = view
    return flats


def _pieces(
    buffers: GradientBuffers, weights: Sequence[Tensor], owned: Sequence[tuple[int, int, int]]
) -> list[list[Piece]]:
    found: list[list[Piece]] = []
    for place in buffers.places:
        mine: list[Piece] = []
        for buffer, first, last in owned:
            start, end = max(first, place.start), min(last, place.start + place.count)
            if buffer == place.buffer and start < end:
                weight = weights[buffer][start:end].detach()
                gradient = buffers.flats[buffer][start:end]
                mine.append(Piece(start - place.start, weight, gradient))
        found.append(mine)
    return found


def _refuse_parts(shard: OptimizerShard, optimizer: Optimizer) -> list[RemovableHandle]:
    """Let nobody save the pieces of one rank for the whole, nor load a whole for pieces; gives the
    handles of what sees to it.
    """
    itself = weakref.ref(shard)

    def before(call: str, instead: str) -> None:
        living = itself()
        if living is not None and not living.loads:
            raise JobError(
                f"optimizer.{call}() was called, but this rank's optimizer holds a part of the "
                f"state only: call accumulator.{instead} instead, which knows the whole"
            )

    return [
        optimizer.register_state_dict_pre_hook(
            lambda *_: before("state_dict", "optimizer_state() on all ranks")
        ),
        optimizer.register_load_state_dict_pre_hook(
            lambda *_: before("load_state_dict", "load_optimizer_state(state)")
        ),
    ]
