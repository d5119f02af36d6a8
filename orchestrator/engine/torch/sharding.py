"""Sharded optimizer: each rank keeps the state of 1/R of the weights and steps only those.

Parameters move into flat buffers with the gradient's layout and become views of them, so a bucket
of weights is one slice, as a bucket of the gradient is. Rank r owns segment r of each bucket. The
parts of a parameter in its segments (pieces) replace the parameter in the optimizer.

    [Rajbhandari et al. 2020, ZeRO, stage 1 and the gradient's half of stage 2, arXiv 1910.02054]
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from orchestrator.engine.common.packed_sums import WIDE, Trailer
from orchestrator.engine.torch.buffers import (
    GradientBuffers,
    Place,
    bucket_slices,
    segment_of,
    view_of,
)
from orchestrator.engine.torch.group import BaseGroup, Work, gather_numbers, gather_texts
from orchestrator.engine.torch.reducer import FastReduction, GradientNorm
from orchestrator.engine.torch.start_checks import broadcast_tensors
from orchestrator.errors import ConfigError, JobError, StateLost

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adadelta,
    optim.RMSprop, optim.Rprop, optim.ASGD,
)  # fmt: skip
"""These classes only: a subclass may look at norms or shapes.

Adagrad has state from the beginning, Adafactor and Muon look at matrices."""

SCALARS = ("step", "mu_product", "eta", "mu")
"""State that these keep once for a parameter. All other state has the parameter's shape."""


def check_shardable(optimizer: Optimizer, parameters: Sequence[tuple[str, Tensor]]) -> None:
    """Raise `ConfigError` for an optimizer that cannot be stepped in pieces.

    Args:
        optimizer: over the `parameters`, and perhaps some that are not trained.
        parameters: the trained ones, with names.
    """
    kind = type(optimizer)
    if kind not in ELEMENTWISE:
        known = ", ".join(one.__name__ for one in ELEMENTWISE)
        raise ConfigError(
            f"engine.shard_optimizer=true steps pieces of parameters, and {kind.__module__}."
            f"{kind.__qualname__} may need them whole; it works with torch.optim's {known}. Use "
            "one of these, or engine.shard_optimizer=false"
        )
    if optimizer.defaults.get("differentiable"):
        raise ConfigError("engine.shard_optimizer=true is not available with differentiable=True")
    if any(optimizer.state.values()):
        raise ConfigError(
            f"the {kind.__name__} has state already, which engine.shard_optimizer=true cannot "
            "cut up: build the accumulator before the first step, and load a saved state into it"
        )
    _refuse_shared_memory(parameters)


def _refuse_shared_memory(parameters: Sequence[tuple[str, Tensor]]) -> None:
    """Parameters that are views of one memory would be parted where they are moved."""
    ranges = sorted(
        (p.data_ptr(), p.data_ptr() + _bytes_reached(p), name)
        for name, p in parameters
        if p.numel()
    )
    for (_, end, name), (start, _, other) in pairwise(ranges):
        if start < end:
            raise ConfigError(
                f"parameters {name} and {other} share memory; engine.shard_optimizer=true moves "
                "parameters, and would part them. Use one parameter in both places"
            )


def _bytes_reached(parameter: Tensor) -> int:
    """From its first number to behind its last, gaps included."""
    last = sum(
        (n - 1) * stride for n, stride in zip(parameter.shape, parameter.stride(), strict=True)
    )
    return (last + 1) * parameter.element_size()


# ------------------------------------------------------------------ Shard of one rank


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
    """One rank's shard; replaces `GradientBuffers` where the optimizer steps.

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
        weights = _move_parameters(buffers)
        self._addresses = [place.parameter.data_ptr() for place in buffers.places]
        self._weights = [weights[buffer][start:end] for buffer, start, end in buckets]
        self.pieces = _cut_pieces(buffers, weights, owned)
        self._whole = [list(g["params"]) for g in optimizer.param_groups]
        numbers = {id(place.parameter): number for number, place in enumerate(buffers.places)}
        self.groups = [[numbers.get(id(p)) for p in g["params"]] for g in optimizer.param_groups]
        for g, mine in zip(optimizer.param_groups, self.groups, strict=True):
            pieces = (piece for n in mine if n is not None for piece in self.pieces[n])
            g["params"] = [piece.weight for piece in pieces]
        self._loads = False
        self._guards = _guard_state_dict(self, optimizer)

    @property
    def is_loading(self) -> bool:
        """True if this rank's part of a whole state is being loaded."""
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
        """Return the names of the parameters whose gradient holds NaN or infinity. Collective."""
        mine = [
            sum(not bool(torch.isfinite(piece.gradient).all()) for piece in pieces)
            for pieces in self.pieces
        ]
        counts = torch.tensor(mine, dtype=torch.int32, device=self.group.device)
        self.group.all_reduce_sum(counts)
        return [self.buffers.places[n].name for n, count in enumerate(counts.tolist()) if count]

    def gather_weights(self) -> None:
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


def _move_parameters(buffers: GradientBuffers) -> list[Tensor]:
    """Return the parameters' new memory: flat, laid out as the gradient, padding zero."""
    flats = [torch.zeros_like(flat) for flat in buffers.flats]
    for place in buffers.places:
        view = view_of(flats[place.buffer], place, place.start)
        view.copy_(place.parameter.detach())
        place.parameter.data = view
    return flats


def _cut_pieces(
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


def _guard_state_dict(shard: OptimizerShard, optimizer: Optimizer) -> list[RemovableHandle]:
    """Refuse to save one rank's pieces as the whole state, or to load a whole state into pieces;
    return the handles of the hooks.
    """
    itself = weakref.ref(shard)

    def before(call: str, instead: str) -> None:
        living = itself()
        if living is not None and not living.is_loading:
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


# ------------------------------------------------------------------ Reduction
# Reducing a bucket is a reduce-scatter, half of an all-reduce; the other half, a gather, is of the
# weights, once their owners have stepped them. No rank has the whole gradient, so the trailer
# travels in one small gather: each rank's row of exact sums, and the norm of its segments.


class ShardedReduction(FastReduction):
    """A `FastReduction` that leaves each rank with the sum of its segments.

    The buffers have no trailer, and are padded to a multiple of the ranks.
    """

    def _cut(self, bucket_bytes: int | None) -> list[tuple[int, int, int]]:
        slices = bucket_slices(self.buffers.flats, bucket_bytes, multiple_of=self._group.size)
        self._owned = [segment_of(bucket, self._group.rank, self._group.size) for bucket in slices]
        return slices

    def _gradients_in_buckets(self) -> list[Tensor]:
        gradients = self.buffers.gradients
        return [gradients[buffer][start:end] for buffer, start, end in self._owned]

    def _start(self, number: int) -> Work:
        buffer, start, end = self._owned[number]
        segment = self.buffers.flats[buffer][start:end]
        return self._group.reduce_scatter_sum_async(segment, self._buckets[number])

    def finish(self, trailer: Trailer, norm: GradientNorm) -> Trailer:
        """Send the rest, wait for this rank's sums, exchange rows. Collective.

        Args:
            norm: takes in the norms of the ranks' segments, whose norm is the gradient's.
        """
        self.buffers.complete()
        norm_of_segments = GradientNorm()
        self._send_rest(norm_of_segments)
        row = [*trailer.numbers(WIDE), norm_of_segments.value()]
        rows = self._group.all_gather(
            torch.tensor([row], dtype=torch.float64, device=self._group.device)
        )
        norm.add(rows[:, -1])
        # Limbs are whole numbers small enough for float64 to add up those of all ranks exactly.
        return Trailer.of(rows[:, :-1].sum(0).tolist(), len(trailer.metrics), WIDE)


# ------------------------------------------------------------------ State of the whole optimizer
# Checkpoints do not know of shards. Gathering is collective: ranks exchange what they keep of
# which parameter, then each kind of state travels bucket by bucket, as weights do, and rank 0
# stores it in its own memory. Loading needs no communication: every rank reads a whole checkpoint
# and takes its pieces.


@dataclass(frozen=True, slots=True, order=True)
class _Kind:
    """State of one name and dtype, over the parameters of one buffer."""

    buffer: int
    key: str
    dtype: str

    def zeros(self, numbers: int, device: torch.device | str = "cpu") -> Tensor:
        return torch.zeros(numbers, dtype=_dtype(self.dtype), device=device)


def gather_state_on_first(shard: OptimizerShard) -> dict[str, Any] | None:
    """Return `state_dict()` of the whole optimizer on the CPU, on rank 0; None on others.

    Collective. Beside the result it takes one bucket of memory on each rank.
    """
    layout = _gather_layout(shard, shard.group)
    whole = {kind: _gathered_kind(shard, kind) for kind in _kinds(layout)}
    return _assemble(shard, layout, whole) if shard.group.rank == 0 else None


def gather_state_on_all(shard: OptimizerShard, left: BaseGroup) -> dict[str, Any]:
    """Return the whole state on every rank of `left`, which holds ranks of the shard's group.

    Collective over `left`. For a moment each of them has all of the state.

    Raises:
        StateLost: on all ranks; a rank of the shard's group is gone.
    """
    size = shard.group.size
    ranks = [int(row[0]) for row in gather_numbers(left, [shard.group.rank])]
    if lost := [rank for rank in range(size) if rank not in ranks]:
        raise StateLost(lost)
    sources = [ranks.index(rank) for rank in range(size)]
    layout = _gather_layout(shard, left)
    whole = {kind: _recovered_kind(shard, kind, left, sources) for kind in _kinds(layout)}
    return _assemble(shard, layout, whole)


def _kinds(layout: dict[int, dict[str, Any]]) -> list[_Kind]:
    return sorted({v for held in layout.values() for v in held.values() if isinstance(v, _Kind)})


def _assemble(
    shard: OptimizerShard, layout: dict[int, dict[str, Any]], whole: Mapping[_Kind, Tensor]
) -> dict[str, Any]:
    """As `state_dict()` of an optimizer that is not sharded."""
    states: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    index = 0
    for numbers, group in zip(shard.groups, shard.optimizer.param_groups, strict=True):
        groups.append({**group, "params": list(range(index, index + len(numbers)))})
        for number in numbers:
            if number in layout:
                place = shard.buffers.places[number]
                states[index] = {
                    key: view_of(whole[v], place, place.start) if isinstance(v, _Kind) else v
                    for key, v in layout[number].items()
                }
            index += 1
    return {"state": states, "param_groups": groups}


def shard_of_state(shard: OptimizerShard, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's part of the state of a whole optimizer.

    Not collective.

    Raises:
        ValueError: it is the state of other parameters.
    """
    groups: list[dict[str, Any]] = saved["param_groups"]
    if [len(group["params"]) for group in groups] != [len(numbers) for numbers in shard.groups]:
        raise ValueError("the saved state has other groups, or groups of other sizes")
    states: dict[int, dict[str, Any]] = {}
    parts: list[dict[str, Any]] = []
    index = 0
    for numbers, group in zip(shard.groups, groups, strict=True):
        first = index
        for number, saved_as in zip(numbers, group["params"], strict=True):
            state: Mapping[str, Any] = saved["state"].get(saved_as) or {}
            if number is None or not shard.pieces[number]:
                continue
            place = shard.buffers.places[number]
            flat = {
                key: _flatten_state(place, v) for key, v in state.items() if _is_elementwise(key, v)
            }
            for piece in shard.pieces[number]:
                end = piece.start + piece.weight.numel()
                states[index] = {
                    key: flat[key][piece.start : end].clone()
                    if key in flat
                    else _copy_scalar(value)
                    for key, value in state.items()
                }
                index += 1
        parts.append({**group, "params": list(range(first, index))})
    return {"state": {n: state for n, state in states.items() if state}, "param_groups": parts}


# ------------------------------------------------------------------ what is kept


def _gather_layout(shard: OptimizerShard, group: BaseGroup) -> dict[int, dict[str, Any]]:
    """By the parameter's number what is kept of it: a number once for it, or the kind. Collective.

    Every rank that has a piece of a parameter keeps the same, so the first one counts.
    """
    mine = {
        number: {key: _described(key, value) for key, value in state.items()}
        for number, pieces in enumerate(shard.pieces)
        for piece in pieces[:1]
        if (state := shard.optimizer.state.get(piece.weight))
    }
    layout: dict[int, dict[str, Any]] = {}
    for text in gather_texts(group, json.dumps(mine)):
        for number, held in json.loads(text).items():
            buffer = shard.buffers.places[int(number)].buffer
            layout.setdefault(
                int(number), {key: _value(buffer, key, *said) for key, said in held.items()}
            )
    return layout


def _described(key: str, value: Any) -> tuple[str, Any]:
    """(dtype, number) of a scalar tensor, (dtype, None) of a kind, ("", value) of what is no
    tensor.
    """
    if not isinstance(value, Tensor):
        return "", value
    name = str(value.dtype).removeprefix("torch.")
    return name, None if _is_elementwise(key, value) else value.item()


def _value(buffer: int, key: str, dtype: str, value: Any) -> Any:
    if not dtype:
        return value
    return _Kind(buffer, key, dtype) if value is None else torch.tensor(value, dtype=_dtype(dtype))


def _is_elementwise(key: str, value: Any) -> bool:
    return isinstance(value, Tensor) and key not in SCALARS


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)  # noqa: S101  # it is a dtype's name
    return found


# ------------------------------------------------------------------ numbers


def _gathered_kind(shard: OptimizerShard, kind: _Kind) -> Tensor:
    """Return all ranks' numbers of a kind, laid out as the buffer; empty but on rank 0.
    Collective.
    """
    first = shard.group.rank == 0
    whole = kind.zeros(shard.buffers.flats[kind.buffer].numel() if first else 0)
    for start, bucket in _buckets(shard, kind):
        shard.group.gather_in_place_async(bucket).wait()
        if first:
            whole[start : start + len(bucket)] = bucket
    return whole


def _recovered_kind(
    shard: OptimizerShard, kind: _Kind, left: BaseGroup, sources: Sequence[int]
) -> Tensor:
    """Return the numbers of a kind on every rank of `left`.

    Args:
        sources: for each rank of the shard's group its number in `left`.
    """
    whole = kind.zeros(shard.buffers.flats[kind.buffer].numel())
    for start, bucket in _buckets(shard, kind):
        for segment, source in zip(bucket.chunk(len(sources)), sources, strict=True):
            broadcast_tensors(left, [segment], source)
        whole[start : start + len(bucket)] = bucket
    return whole


def _buckets(shard: OptimizerShard, kind: _Kind) -> Iterator[tuple[int, Tensor]]:
    """Yield this rank's numbers of a kind: the start of each bucket, and the bucket."""
    held: list[tuple[int, Tensor]] = []
    for place, pieces in zip(shard.buffers.places, shard.pieces, strict=True):
        for piece in pieces if place.buffer == kind.buffer else ():
            value = shard.optimizer.state.get(piece.weight, {}).get(kind.key)
            if isinstance(value, Tensor) and value.dtype == _dtype(kind.dtype):
                held.append((place.start + piece.start, value))
    for buffer, start, end in shard.buckets:
        if buffer == kind.buffer:
            bucket = kind.zeros(end - start, shard.buffers.flats[buffer].device)
            for at, value in held:
                if start <= at < end:
                    bucket[at - start : at - start + value.numel()] = value
            yield start, bucket


def _flatten_state(place: Place, value: Tensor) -> Tensor:
    """Return a state of the parameter's shape as it lies in a flat buffer."""
    parameter = place.parameter
    if value.shape != parameter.shape or value.is_complex() != parameter.is_complex():
        raise ValueError(
            f"the saved state of {place.name} is of shape {tuple(value.shape)}, but the parameter "
            f"is of {tuple(parameter.shape)}"
        )
    dtype = value.real.dtype if value.is_complex() else value.dtype
    flat = torch.empty(place.count, dtype=dtype, device=value.device)
    view_of(flat, place).copy_(value)
    return flat


def _copy_scalar(value: Any) -> Any:
    """Return a scalar of a piece's own, since optimizers count in place."""
    return value.clone() if isinstance(value, Tensor) else value
