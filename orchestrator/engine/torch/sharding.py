"""Sharded optimizer: each rank keeps the state of 1/R of the weights and steps only those.

Parameters move into flat buffers with the gradient's layout and become views of them, so a bucket
of weights is one slice, as a bucket of the gradient is. Rank r owns segment r of each bucket. The
parts of a parameter in its segments (pieces) replace the parameter in the optimizer; a parameter
that an optimizer needs whole lies in one segment (`owners`), and is one piece. Pieces of float16
and bfloat16 parameters are float32 masters, which a step is rounded from, so that steps too small
for the parameter's dtype add up all the same.

    [Rajbhandari et al. 2020, ZeRO, stage 1 and the gradient's half of stage 2, arXiv 1910.02054]
"""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from orchestrator.config.rules import SHARDABLE
from orchestrator.engine.common.packing import unpack
from orchestrator.engine.common.trailer import WIDE, Trailer
from orchestrator.engine.torch.buffers import (
    GradientBuffers,
    GradientSlot,
    Named,
    Slice,
    bucket_slices,
)
from orchestrator.engine.torch.group import (
    BaseGroup,
    broadcast_tensors,
    gather_numbers,
    gather_texts,
)
from orchestrator.engine.torch.owners import Ownership
from orchestrator.engine.torch.reducer import FastReduction, GradientNorm
from orchestrator.engine.torch.state import MASTER, pack, restore_optimizer
from orchestrator.errors import ConfigError, JobError, StateLost

ELEMENTWISE: tuple[type[Optimizer], ...] = tuple(getattr(optim, name) for name in SHARDABLE)
"""These classes only: a subclass may look at norms or shapes."""

SCALARS = ("step", "mu_product", "eta", "mu")
"""State that these keep once for a parameter. All other state has the parameter's shape."""


def check_shardable(optimizer: Optimizer, trained: Named, tensors: Named) -> None:
    """Raise `ConfigError` for an optimizer that cannot be sharded.

    Args:
        optimizer: over the `trained` parameters, and perhaps some that are not.
        tensors: all parameters and buffers of the model.
    """
    kind = type(optimizer)
    if optimizer.defaults.get("differentiable"):
        raise ConfigError("engine.shard_optimizer=true is not available with differentiable=True")
    if any(optimizer.state.values()):
        raise ConfigError(
            f"the {kind.__name__} has state already, which engine.shard_optimizer=true cannot "
            "cut up: build the accumulator before the first step, and load a saved state into it"
        )
    # Trained parameters move, and tensors that share their memory would be left behind.
    moved = {id(parameter) for _, parameter in trained}
    ranges: list[tuple[int, int, str, bool]] = []  # to behind each one's last number, gaps included
    for name, p in {id(p): (name, p) for name, p in reversed(tensors)}.values():
        if p.numel() and p.layout is torch.strided:
            last = sum((n - 1) * stride for n, stride in zip(p.shape, p.stride(), strict=True))
            end = p.data_ptr() + (last + 1) * p.element_size()
            ranges.append((p.data_ptr(), end, name, id(p) in moved))
    farthest = farthest_moved = (0, "")
    for start, end, name, moves in sorted(ranges):
        reached, other = farthest if moves else farthest_moved
        if start < reached:
            raise ConfigError(
                f"{other} and {name} share memory; engine.shard_optimizer=true moves trained "
                "parameters, and would separate them. Use one parameter in both places"
            )
        farthest = max(farthest, (end, name))
        if moves:
            farthest_moved = max(farthest_moved, (end, name))


# ------------------------------------------------------------------ Reduction
# Reducing a bucket is a reduce-scatter, half of an all-reduce; the other half, a gather, is of the
# weights, once their owners have stepped them. No rank has the whole gradient, so the trailer
# travels in one small gather: each rank's row of exact sums, and the norm of its segments.


class RowReduction(FastReduction):
    """A `FastReduction` that leaves each rank with a part of the sum. The buffers have no trailer.

    A subclass sets `_all_ranks`, which exchange rows.
    """

    _all_ranks: BaseGroup
    _counts_in_norm = True  # no other rank has this one's part as well

    def reduce(self, trailer: Trailer) -> tuple[Trailer, GradientNorm]:
        """Send the rest, wait for this rank's sums, exchange rows. Collective."""
        own = self._reduce_buckets()
        row = [*trailer.numbers(WIDE), own.value() if self._counts_in_norm else 0.0]
        rows = self._all_ranks.all_gather(
            torch.tensor([row], dtype=torch.float64, device=self._all_ranks.device)
        )
        norm = GradientNorm()  # that of the ranks' norms
        norm.add(rows[:, -1])
        # Limbs are whole numbers small enough for float64 to add up those of all ranks exactly.
        return Trailer.from_numbers(rows[:, :-1].sum(0).tolist(), WIDE), norm

    def non_finite(self) -> list[str]:
        """Return the parameters whose summed gradient holds NaN or infinity. Collective."""
        counts_of_parts = [
            sum(
                not bool(self.buffers.flats[slot.buffer][start:end].isfinite().all())
                for start, end in slot.ranges_in(self.owned)
            )
            for slot in self.buffers.slots
        ]
        counts = torch.tensor(counts_of_parts, dtype=torch.int32, device=self._all_ranks.device)
        self._all_ranks.all_reduce_sum(counts)
        return [self.buffers.slots[n].name for n, count in enumerate(counts.tolist()) if count]


class ShardedReduction(RowReduction):
    """A reduction that leaves each rank with the sum of its segments.

    Args:
        buffers: padded to a multiple of the ranks, but for those of whole parameters.
        owners: of whole parameters, each bucket of which is a buffer.

    Attributes:
        owned: this rank's segment of each bucket.
        sizes: of the segments of each bucket, in the order of ranks; None where they are equal.
    """

    def __init__(
        self,
        buffers: GradientBuffers,
        group: BaseGroup,
        bucket_bytes: int | None,
        *,
        overlap: bool,
        owners: Ownership,
    ) -> None:
        self.owners = owners
        shared = buffers.flats[: buffers.shared]
        slices = bucket_slices(shared, bucket_bytes, multiple_of=group.size)
        sizes: list[list[int] | None] = [None] * len(slices)
        for buffer, bucket in enumerate(owners.buckets, start=buffers.shared):
            slices.append((buffer, 0, buffers.flats[buffer].numel()))
            segments = [0] * group.size
            for number, owner in zip(bucket.members, bucket.owners, strict=True):
                segments[owner] += buffers.slots[number].count
            sizes.append(segments)
        if owners.buckets:  # a backward reaches parameters from the last to the first
            firsts = [
                min(n for n, slot in enumerate(buffers.slots) if any(slot.ranges_in([bucket])))
                for bucket in slices
            ]
            order = sorted(range(len(slices)), key=lambda number: -firsts[number])
            slices, sizes = [slices[n] for n in order], [sizes[n] for n in order]
        owned: list[Slice] = []
        for (buffer, start, end), segments in zip(slices, sizes, strict=True):
            lengths = segments or [(end - start) // group.size] * group.size
            first = start + sum(lengths[: group.rank])
            owned.append((buffer, first, first + lengths[group.rank]))
        super().__init__(buffers, group, slices, owned=owned, overlap=overlap)
        self._all_ranks, self.sizes = group, sizes

    def _send_next(self) -> None:
        number = len(self._in_flight)
        buffer, start, end = self.owned[number]
        segment, bucket = self.buffers.flats[buffer][start:end], self._buckets[number]
        self._in_flight.append(
            self._group.reduce_scatter_sum_async(
                segment, bucket, self.sizes[number], in_window=True
            )
        )


# ------------------------------------------------------------------ Shard of one rank


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A parameter's numbers from `start` on, n of them; or all of them, in the parameter's shape.

    Attributes:
        weight: shape (n), a leaf that the optimizer steps: it shares the parameter's memory, or is
            the master of `rounded`.
        gradient: shape (n), in the flat gradient.
        rounded: shape (n), shares the parameter's memory, where `weight` is a master.
        is_whole: it is a whole parameter, whose state may have any shape.
    """

    start: int
    weight: Tensor
    gradient: Tensor
    rounded: Tensor | None = None
    is_whole: bool = False


Layout = dict[int, dict[str, tuple[str, Any]]]
"""By parameter and name what an optimizer keeps: the dtype of a tensor, "" for what is none, and
the value, None for a tensor of the parameter's shape."""


class OptimizerShard:
    """One rank's shard; replaces `GradientBuffers` where the optimizer steps.

    Args:
        optimizer: one that `check_shardable` lets pass; from now on it holds pieces.
        reduction: whose buckets and segments the weights have, too.
        group: the ranks, two or more.

    Attributes:
        flat_grads: this rank's segments of the summed gradient, padding left out.
    """

    def __init__(self, optimizer: Optimizer, reduction: ShardedReduction, group: BaseGroup) -> None:
        self._optimizer, self._group = optimizer, group
        self._slices, buffers = reduction.slices, reduction.buffers
        self._sizes, self._owner_of = reduction.sizes, reduction.owners.owner_of
        self._slots, self._flats = buffers.slots, buffers.flats
        self.flat_grads = reduction.reduced
        self._addresses = [slot.parameter.data_ptr() for slot in self._slots]
        self._weights = [buffers.weights[buffer][start:end] for buffer, start, end in self._slices]
        # Of each parameter; none for many of them.
        self._pieces: list[list[Piece]] = [[] for _ in self._slots]
        for number, slot in enumerate(self._slots):
            is_whole = number in self._owner_of
            for start, end in slot.ranges_in(reduction.owned):
                weight = buffers.weights[slot.buffer][start:end].detach()
                gradient = buffers.flats[slot.buffer][start:end]
                if is_whole:
                    weight = slot.view(buffers.weights[slot.buffer]).detach()
                    gradient = slot.view(buffers.flats[slot.buffer])
                # A master's dtype is the gradient's; else it is the weight itself.
                rounded = None if weight.real.dtype == gradient.real.dtype else weight
                master = weight.to(gradient.dtype)
                pieces = self._pieces[number]
                pieces.append(Piece(start - slot.start, master, gradient, rounded, is_whole))
        self._whole = [list(g["params"]) for g in optimizer.param_groups]
        numbers = {id(slot.parameter): number for number, slot in enumerate(self._slots)}
        # The numbers of the parameters in each group, None for those that are not trained.
        self._groups = [[numbers.get(id(p)) for p in params] for params in self._whole]
        for g, indices in zip(optimizer.param_groups, self._groups, strict=True):
            pieces = (piece for n in indices if n is not None for piece in self._pieces[n])
            g["params"] = [piece.weight for piece in pieces]
        self._loads = False
        itself = weakref.ref(self)  # hooks live as long as the optimizer

        def refuse(call: str, instead: str) -> None:
            """Refuse to save pieces as the whole state, or to load a whole state into pieces."""
            living = itself()
            if living is not None and not living._loads:  # noqa: SLF001  # ours
                raise JobError(
                    f"optimizer.{call}() was called, but this rank's optimizer holds a part of the "
                    f"state only: call accumulator.{instead} instead, which knows the whole"
                )

        stepping = self._stepping = [False]  # outlives this object, as the optimizer may

        def refuse_step(*_: Any) -> None:
            if not stepping[0]:
                raise JobError(
                    "optimizer.step() was called, but this optimizer holds pieces of parameters: "
                    "accumulator.boundary() steps it; after close(release=True) it has whole "
                    "parameters again, and no state"
                )

        self._guards = [
            optimizer.register_step_pre_hook(refuse_step),
            optimizer.register_state_dict_pre_hook(
                lambda *_: refuse("state_dict", "optimizer_state() on all ranks")
            ),
            optimizer.register_load_state_dict_pre_hook(
                lambda *_: refuse("load_state_dict", "load_optimizer_state(state)")
            ),
        ]

    @contextmanager
    def stepping(self, unused: Iterable[int]) -> Generator[None]:
        """Let the optimizer step in here on all pieces but those of `unused` parameters.

        Afterwards every `.grad` is None: no rank has all of the gradient to show.

        Raises:
            JobError: a parameter is no longer where its pieces are.
        """
        # The pieces share the memory that parameters had when they were cut.
        for slot, address in zip(self._slots, self._addresses, strict=True):
            if slot.parameter.data_ptr() != address:
                raise JobError(
                    f"parameter {slot.name} was given other memory after the accumulator was "
                    "built, by model.to(...) say; with engine.shard_optimizer=true it has to stay"
                )
        left_alone = set(unused)
        for number, pieces in enumerate(self._pieces):
            for piece in pieces:
                master, rounded = piece.weight, piece.rounded
                if rounded is not None:
                    # Take over weights that were written since the last step: loaded, or clamped.
                    changed = rounded != master.to(rounded.dtype)
                    master.copy_(torch.where(changed, rounded.to(master.dtype), master))
                piece.weight.grad = None if number in left_alone else piece.gradient
        self._stepping[0] = True
        try:
            yield
        finally:
            self._stepping[0] = False
        for slot, pieces in zip(self._slots, self._pieces, strict=True):
            slot.parameter.grad = None
            for piece in pieces:
                piece.weight.grad = None
                if piece.rounded is not None:
                    piece.rounded.copy_(piece.weight)

    def gather_weights(self) -> None:
        """Give every rank the weights that their owners have stepped. Collective."""
        # Not while the next forward computes: code that reads weights outside of their layer's own
        # forward, such as an average of weights, would get those of before, in silence. It takes
        # 1.6 % of a window of 4 micro-steps, 0.4 % of 16 (transformer, two ranks, loopback gloo).
        buckets = zip(self._weights, self._sizes, strict=True)
        for work in [self._group.gather_in_place_async(*bucket) for bucket in buckets]:
            work.wait()

    def release(self) -> None:
        """Let the optimizer have whole parameters again, without any state."""
        for guard in self._guards:
            guard.remove()
        for group, parameters in zip(self._optimizer.param_groups, self._whole, strict=True):
            group["params"] = parameters
        self._optimizer.state.clear()  # it is of pieces
        self._pieces, self._weights, self.flat_grads = [], [], []

    # -------------------------------------------------------------- state of the whole optimizer
    # Checkpoints do not know of shards. Gathering is collective: ranks exchange what they keep of
    # which parameter, then each kind of state travels bucket by bucket, as weights do, and rank 0
    # stores it in its own memory. Loading needs no communication: every rank reads a whole
    # checkpoint and takes its pieces.

    def whole_state(self, survivors: BaseGroup | None = None) -> dict[str, Any] | None:
        """Return `state_dict()` of the whole optimizer on the CPU, on rank 0; None on others.

        Collective. Besides the result it takes one bucket of memory on each rank.

        Args:
            survivors: the remaining ranks: all of them get the state, and they alone call.

        Raises:
            StateLost: on all ranks; a rank of the group is not in `survivors`.
        """
        group, is_kept = self._group, self._group.rank == 0
        sources: list[int] = []
        if survivors is not None:
            ranks = [int(row[0]) for row in gather_numbers(survivors, [self._group.rank])]
            if lost := [rank for rank in range(self._group.size) if rank not in ranks]:
                raise StateLost(lost)
            sources = [ranks.index(rank) for rank in range(self._group.size)]
            group, is_kept = survivors, True
        layout = self._gather_layout(group)
        # State of one name and dtype, over the parameters of one buffer, lies as their weights do.
        kinds = {
            (self._slots[number].buffer, key, dtype)
            for number, entries in layout.items()
            for key, (dtype, value) in entries.items()
            if dtype and value is None
        }
        whole: dict[tuple[int, str, str], Tensor] = {}
        for kind in sorted(kinds):  # in the same order on all ranks
            buffer, key, dtype = kind
            flat, dtype = self._flats[buffer], getattr(torch, dtype)
            # On the CPU: a device may lack room for all of it.
            whole[kind] = torch.zeros(flat.numel() if is_kept else 0, dtype=dtype)
            own: list[tuple[int, Tensor]] = []
            for slot, pieces in zip(self._slots, self._pieces, strict=True):
                for piece in pieces if slot.buffer == buffer else ():
                    value = self._state_of(piece).get(key)
                    if isinstance(value, Tensor) and value.dtype == dtype:
                        own.append((slot.start + piece.start, value))
            for start, end in [(start, end) for b, start, end in self._slices if b == buffer]:
                bucket = torch.zeros(end - start, dtype=dtype, device=flat.device)
                for at, value in own:
                    if start <= at < end:
                        bucket[at - start : at - start + value.numel()] = value
                if survivors is None:
                    group.gather_in_place_async(bucket).wait()
                else:
                    for segment, source in zip(bucket.chunk(len(sources)), sources, strict=True):
                        broadcast_tensors(survivors, [segment], source)
                if is_kept:
                    whole[kind][start:end] = bucket
        owned = self._gather_owned(group, sources or range(group.size), is_kept=is_kept)
        return self._assemble(layout, whole, owned) if is_kept else None

    def _gather_owned(
        self, group: BaseGroup, sources: Sequence[int], *, is_kept: bool
    ) -> dict[int, dict[str, Any]]:
        """Return the states of whole parameters, on the CPU, by their numbers; none on ranks that
        keep none. Collective. Takes one tensor of memory on each rank.

        Args:
            sources: the rank in `group` of each owner.
        """
        if not self._owner_of:
            return {}
        own: dict[int, dict[str, Tensor]] = {}
        descriptions: dict[int, Any] = {}
        for number, pieces in enumerate(self._pieces):
            for piece in (piece for piece in pieces if piece.is_whole):
                own[number] = {}
                packed = pack(dict(self._state_of(piece)), own[number], "")
                shapes = {path: (_dtype_name(t), list(t.shape)) for path, t in own[number].items()}
                descriptions[number] = packed, shapes
        owned: dict[int, dict[str, Any]] = {}
        for source, text in enumerate(gather_texts(group, json.dumps(descriptions))):
            for number, (packed, shapes) in ((int(n), v) for n, v in json.loads(text).items()):
                assert source == sources[self._owner_of[number]]  # noqa: S101  # by construction
                tensors: dict[str, Tensor] = {}
                for path, (dtype, shape) in shapes.items():
                    tensor = own.get(number, {}).get(path)
                    if tensor is None:
                        kind = getattr(torch, dtype)
                        tensor = torch.empty(shape, dtype=kind, device=group.device)
                    sent = tensor.detach().to(group.device).contiguous()
                    broadcast_tensors(group, [sent], source)
                    if is_kept:
                        tensors[path] = sent.to("cpu", copy=True)
                if is_kept and packed:
                    owned[number] = unpack(packed, tensors)
        return owned

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load this rank's part of the state of a whole optimizer. Not collective.

        Raises:
            ValueError: it is the state of other parameters.
        """
        groups: list[dict[str, Any]] = saved["param_groups"]
        if [len(group["params"]) for group in groups] != [len(members) for members in self._groups]:
            raise ValueError("the saved state has other groups, or groups of other sizes")
        states: dict[int, dict[str, Any]] = {}
        parts: list[dict[str, Any]] = []
        index = 0
        for numbers, group in zip(self._groups, groups, strict=True):
            first = index
            for number, saved_as in zip(numbers, group["params"], strict=True):
                if number is None or not self._pieces[number]:
                    continue
                state: dict[str, Any] = saved["state"].get(saved_as) or {}
                if state and number not in self._owner_of:
                    state = _flat_state(self._slots[number], state)
                for piece in self._pieces[number]:
                    if state and piece.is_whole:
                        own_state = {
                            key: _at_least_as_wide(copy.deepcopy(value), piece.weight)
                            for key, value in state.items()
                        }
                        master = own_state.pop(MASTER, None)
                        if master is not None and piece.rounded is not None:
                            piece.weight.copy_(master)
                        states[index] = own_state
                    elif state:
                        end = piece.start + piece.weight.numel()
                        part = {
                            key: value[piece.start : end].to(
                                torch.promote_types(value.dtype, piece.weight.dtype), copy=True
                            )
                            if _is_elementwise(key, value)
                            else copy.deepcopy(value)  # optimizers count in place
                            for key, value in state.items()
                        }
                        master = part.pop(MASTER, None)
                        if master is not None and piece.rounded is not None:
                            piece.weight.copy_(master)
                        states[index] = part
                    index += 1
            parts.append({**group, "params": list(range(first, index))})
        self._loads = True  # lets this one pass `refuse`
        try:
            restore_optimizer(self._optimizer, {"state": states, "param_groups": parts})
        finally:
            self._loads = False

    def _gather_layout(self, group: BaseGroup) -> Layout:
        """Return what the ranks of `group` keep of each parameter. Collective.

        Every rank that has a piece of a parameter keeps the same, so the first one counts.
        """
        own_layout: Layout = {}
        for number, pieces in enumerate(self._pieces):
            is_cut = bool(pieces) and not pieces[0].is_whole
            for key, value in self._state_of(pieces[0]).items() if is_cut else ():
                entry = "", value
                if isinstance(value, Tensor):
                    entry = (
                        _dtype_name(value),
                        None if _is_elementwise(key, value) else value.item(),
                    )
                own_layout.setdefault(number, {})[key] = entry
        layout: Layout = {}
        for text in gather_texts(group, json.dumps(own_layout)):
            for number, entries in json.loads(text).items():
                layout.setdefault(int(number), entries)
        return layout

    def _state_of(self, piece: Piece) -> Mapping[str, Any]:
        """Return the optimizer's state of a piece, and its master."""
        state = self._optimizer.state.get(piece.weight, {})
        return state if piece.rounded is None else {**state, MASTER: piece.weight}

    def _assemble(
        self,
        layout: Layout,
        whole: Mapping[tuple[int, str, str], Tensor],
        owned: Mapping[int, dict[str, Any]],
    ) -> dict[str, Any]:
        """Return a `state_dict()` as that of an optimizer that is not sharded."""
        states: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        first = 0
        for numbers, group in zip(self._groups, self._optimizer.param_groups, strict=True):
            indices = range(first, first + len(numbers))
            groups.append({**group, "params": list(indices)})
            first = indices.stop
            for index, number in zip(indices, numbers, strict=True):
                if number is not None and number in owned:
                    states[index] = owned[number]
                if number is None or number not in layout:
                    continue
                slot, state = self._slots[number], dict[str, Any]()
                for key, (dtype, value) in layout[number].items():
                    state[key] = value
                    if dtype and value is None:
                        state[key] = slot.view(whole[slot.buffer, key, dtype])
                    elif dtype:
                        state[key] = torch.tensor(value, dtype=getattr(torch, dtype))
                states[index] = state
        return {"state": states, "param_groups": groups}


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _at_least_as_wide(value: Any, weight: Tensor) -> Any:
    """Return a tensor of the weight's shape in a dtype that loses nothing; all else as it is."""
    if isinstance(value, Tensor) and value.shape == weight.shape:
        return value.to(torch.promote_types(value.dtype, weight.dtype))
    return value


def _is_elementwise(key: str, value: Any) -> bool:
    return isinstance(value, Tensor) and key not in SCALARS


def _flat_state(slot: GradientSlot, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's state, elementwise tensors as they lie in a flat buffer."""
    flat_state, parameter = dict(state), slot.parameter
    for key, value in state.items():
        if not _is_elementwise(key, value):
            continue
        if value.shape != parameter.shape or value.is_complex() != parameter.is_complex():
            raise ValueError(
                f"the saved state of {slot.name} is of shape {tuple(value.shape)}, but the "
                f"parameter is of {tuple(parameter.shape)}"
            )
        dtype = value.real.dtype if value.is_complex() else value.dtype
        flat_state[key] = torch.empty(slot.count, dtype=dtype, device=value.device)
        slot.view(flat_state[key], 0).copy_(value)
    return flat_state
