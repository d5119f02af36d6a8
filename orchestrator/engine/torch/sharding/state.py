"""A sharded optimizer's state as one rank's would be, and back: checkpoints do not know of shards.

Gathering is collective: the ranks tell each other what they keep of which parameter, then each kind
of state travels bucket by bucket, as weights do, and rank 0 lays it down in its own memory. Coming
back needs no talk: every rank reads all of a checkpoint and takes its pieces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orchestrator.engine.torch.checks.at_start.same_start import spread
from orchestrator.engine.torch.comm.base_group import BaseGroup
from orchestrator.engine.torch.comm.gathered import numbers_of_all, texts_of_all
from orchestrator.engine.torch.gradients.buffer import view_of
from orchestrator.engine.torch.gradients.layout import Place
from orchestrator.engine.torch.sharding.eligibility import SCALARS
from orchestrator.engine.torch.sharding.pieces import OptimizerShard
from orchestrator.errors import StateLost


@dataclass(frozen=True, slots=True, order=True)
class _Kind:
    """State of one name and dtype, over the parameters of one buffer."""

    buffer: int
    key: str
    dtype: str

    def zeros(self, numbers: int, device: torch.device | str = "cpu") -> Tensor:
        return torch.zeros(numbers, dtype=_dtype(self.dtype), device=device)


def gathered(shard: OptimizerShard) -> dict[str, Any] | None:
    """What `state_dict()` of the whole optimizer would give, on the CPU; None but on rank 0.

    Collective. Beside the result it takes one bucket of memory on each rank.
    """
    told = _told_by_all(shard, shard.group)
    whole = {kind: _gathered_kind(shard, kind) for kind in _kinds(told)}
    return _put_together(shard, told, whole) if shard.group.rank == 0 else None


def recovered(shard: OptimizerShard, left: BaseGroup) -> dict[str, Any]:
    """Return the same on every rank of `left`, which holds ranks of the shard's group.

    Collective over `left`. For a moment each of them has all of the state.

    Raises:
        StateLost: on all ranks; a rank of the shard's group is gone.
    """
    size = shard.group.size
    ranks = [int(row[0]) for row in numbers_of_all(left, [shard.group.rank])]
    if lost := [rank for rank in range(size) if rank not in ranks]:
        raise StateLost(lost)
    sources = [ranks.index(rank) for rank in range(size)]
    told = _told_by_all(shard, left)
    whole = {kind: _recovered_kind(shard, kind, left, sources) for kind in _kinds(told)}
    return _put_together(shard, told, whole)


def _kinds(told: dict[int, dict[str, Any]]) -> list[_Kind]:
    return sorted({v for held in told.values() for v in held.values() if isinstance(v, _Kind)})


def _put_together(
    shard: OptimizerShard, told: dict[int, dict[str, Any]], whole: Mapping[_Kind, Tensor]
) -> dict[str, Any]:
    """As `state_dict()` of an optimizer that is not sharded."""
    states: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    index = 0
    for numbers, group in zip(shard.groups, shard.optimizer.param_groups, strict=True):
        groups.append({**group, "params": list(range(index, index + len(numbers)))})
        for number in numbers:
            if number in told:
                place = shard.buffers.places[number]
                states[index] = {
                    key: view_of(whole[v], place, place.start) if isinstance(v, _Kind) else v
                    for key, v in told[number].items()
                }
            index += 1
    return {"state": states, "param_groups": groups}


def part_of(shard: OptimizerShard, saved: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's part of what `gathered`, or an optimizer that is not sharded, has given.

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
            flat = {key: _flat(place, v) for key, v in state.items() if _is_elementwise(key, v)}
            for piece in shard.pieces[number]:
                end = piece.start + piece.weight.numel()
                states[index] = {
                    key: flat[key][piece.start : end].clone() if key in flat else _own(value)
                    for key, value in state.items()
                }
                index += 1
        parts.append({**group, "params": list(range(first, index))})
    return {"state": {n: state for n, state in states.items() if state}, "param_groups": parts}


# ------------------------------------------------------------------ what is kept


def _told_by_all(shard: OptimizerShard, group: BaseGroup) -> dict[int, dict[str, Any]]:
    """By the parameter's number what is kept of it: a number once for it, or the kind. Collective.

    Every rank that has a piece of a parameter keeps the same, so the first is heard.
    """
    mine = {
        number: {key: _described(key, value) for key, value in state.items()}
        for number, pieces in enumerate(shard.pieces)
        for piece in pieces[:1]
        if (state := shard.optimizer.state.get(piece.weight))
    }
    told: dict[int, dict[str, Any]] = {}
    for text in texts_of_all(group, json.dumps(mine)):
        for number, held in json.loads(text).items():
            buffer = shard.buffers.places[int(number)].buffer
            told.setdefault(
                int(number), {key: _value(buffer, key, *said) for key, said in held.items()}
            )
    return told


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
    assert isinstance(found, torch.dtype)  # noqa: S101  # it was a dtype's name when it was told
    return found


# ------------------------------------------------------------------ numbers


def _gathered_kind(shard: OptimizerShard, kind: _Kind) -> Tensor:
    """All ranks' numbers of a kind, laid out as the buffer; empty but on rank 0. Collective."""
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
    """The same on every rank of `left`, where rank `sources[q]` has what the shard's rank q had."""
    whole = kind.zeros(shard.buffers.flats[kind.buffer].numel())
    for start, bucket in _buckets(shard, kind):
        for segment, source in zip(bucket.chunk(len(sources)), sources, strict=True):
            spread(left, [segment], source)
        whole[start : start + len(bucket)] = bucket
    return whole


def _buckets(shard: OptimizerShard, kind: _Kind) -> Iterator[tuple[int, Tensor]]:
    """What this rank has of a kind: where each bucket starts, and its numbers, zero elsewhere."""
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


def _flat(place: Place, value: Tensor) -> Tensor:
    """A state of the parameter's shape as it lies in a flat buffer."""
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


def _own(value: Any) -> Any:
    """A scalar of a piece's own, since optimizers count in place."""
    return value.clone() if isinstance(value, Tensor) else value
