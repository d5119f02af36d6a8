"""Checks of each loss (a mean instead of a sum, say), and digests of weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from orchestrator.engine.common.job_checks import check_loss
from orchestrator.engine.common.replicas import (
    LARGEST_PIECE,
    ReplicaChecker,
    WeightRange,
    folded,
    partition_weights,
)
from orchestrator.engine.torch.buffers import Named, local_part
from orchestrator.engine.torch.group import BaseGroup, flatten, gather_numbers
from orchestrator.errors import JobError
from orchestrator.job import Loss

# ------------------------------------------------------------------ Losses
# `Loss` takes sums, and a mean is the commonest mistake: `cross_entropy` returns one by default.
# The last operations of the loss's graph reveal it, for the price of reading a name or two.


_MEAN = 1  # as `torch.nn.functional` numbers its reductions
_ONLY_PASS = ("ToCopy", "Clone", "View", "Squeeze", "Unsqueeze", "Alias", "ReshapeAlias", "Div")
_SUMS = ("Add", "Sub")
_DEEPEST = 8


def averaged_by(node: Any, depth: int = _DEEPEST) -> str | None:
    """Return the operation that made a tensor a mean; None if it is none, or unknown.

    A mean that was multiplied afterwards is ignored: it may be a sum again.

    Args:
        node: the tensor's `grad_fn`.
        depth: how many operations are looked at.

    >>> import torch
    >>> x = torch.ones(4, requires_grad=True)
    >>> [averaged_by(y.grad_fn) for y in (x.mean() / 2, x.mean() * 4, x.sum())]
    ['mean()', None, None]
    """
    if node is None or not depth:
        return None
    name = node.name().partition("Backward")[0]
    if name == "Mean":
        return "mean()" if getattr(node, "_saved_self_sym_numel", None) != 1 else None
    if getattr(node, "_saved_reduction", None) == _MEAN:
        return f"{name}(reduction='mean')"
    if name in _ONLY_PASS or name in _SUMS:
        parts = [part for part, _ in node.next_functions if part is not None]
        if parts and (name in _SUMS or len(parts) == 1):
            found = [averaged_by(part, depth - 1) for part in parts]
            return found[0] if all(found) else None
    return None


def checked_loss(loss: Loss, names: Sequence[str]) -> list[Any]:
    """Return weight, total and the metrics of these names, without graphs and not waited for.

    Raises:
        JobError: `loss` breaks the contract of `Loss`.
    """
    check_loss(loss, names, Tensor)
    total: Any = loss.total
    if not total.requires_grad:
        raise JobError(
            "Loss.total has no graph to back-propagate; was it detached, or computed without grad?"
        )
    numbers: list[Any] = [loss.weight, total, *map(loss.metrics.get, names)]
    row: list[Any] = [n.detach() if isinstance(n, Tensor) else n for n in numbers]
    made_by = averaged_by(total.grad_fn)
    # With a weight of 1 it may be a mean over one sample's numbers, which is that sample's own.
    if made_by is not None and float(row[0]) != 1.0:
        raise JobError(
            f"Loss.total is a mean, made by {made_by}, and Loss.weight is {float(row[0]):g}: "
            "it would be divided twice. Give the sum, with reduction='sum', or multiply the mean "
            "by what it was divided by"
        )
    return row


# ------------------------------------------------------------------ Weights digest
# A sum, modulo 2**64, of the weights' bits times odd numbers. Each place has its own odd 64-bit
# number, so any change of one number changes the sum, and so do two that swap places. It runs at
# some 5 GB/s on a CPU core, and only the sums leave a device. It detects drift, not an adversary.


_ROWS = 128  # of `LARGEST_PIECE` numbers, as int64: 64 MiB
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_ODD = 0x9E3779B97F4A7C15 - 2**64  # 2**64 / golden ratio: its multiples are spread evenly
_MIX = 0xBF58476D1CE4E5B9 - 2**64  # of SplitMix64 [Steele, Lea and Flood 2014]


@lru_cache(maxsize=8)
def _multipliers(device: torch.device) -> Tensor:
    """Odd 64-bit numbers, the same on every machine: as many as the largest piece may need."""
    mixed = torch.arange(1, 4 * LARGEST_PIECE + 1, dtype=torch.int64) * _ODD
    mixed = (mixed ^ (mixed >> 30)) * _MIX
    return ((mixed ^ (mixed >> 27)) | 1).to(device)


def _sum_of(bits: Tensor) -> Tensor:
    return (bits * _multipliers(bits.device)[: len(bits)]).sum()


def _sums_together(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return what `_sum_of` gives for each part, in few kernels, as a device wants it."""
    sums: list[Tensor] = []
    for _, alike in groupby(parts, key=lambda part: (part.device, part.dtype, len(part))):
        rows = list(alike)
        for first in range(0, len(rows), _ROWS):
            some = torch.stack(rows[first : first + _ROWS])
            sums += (some * _multipliers(some.device)[: some.shape[1]]).sum(1).unbind()
    return sums


def digests_of(
    parameters: Sequence[Tensor], pieces: Sequence[WeightRange], *, joint: bool = False
) -> list[int]:
    """Return a digest of each piece, of its values now.

    Args:
        joint: pieces that are small and alike may have one digest together, which takes less time.
    """
    parts: list[Tensor] = []
    devices: set[torch.device] = set()
    dtypes: set[torch.dtype] = set()
    for piece in pieces:
        numbers = flatten(parameters[piece.number].detach().reshape(-1)[piece.start : piece.end])
        parts.append(numbers.view(_BITS[min(numbers.element_size(), 4)]))
        devices.add(numbers.device)
        dtypes.add(parts[-1].dtype)
    alike = len(devices) == len(dtypes) == 1
    if joint and alike and sum(map(len, parts)) <= LARGEST_PIECE:
        parts = [torch.cat(parts)]
    on_cpu = devices == {torch.device("cpu")}
    sums = list(map(_sum_of, parts)) if on_cpu else _sums_together(parts)
    if len(devices) == 1:
        return torch.stack(sums).tolist()  # one wait for the device, not one a piece
    return list(map(int, sums))


def tensor_digest(tensor: Tensor) -> int:
    """Return a digest of all numbers of a tensor of any dtype, by one wait for its device."""
    whole = partition_weights([tensor.numel()], [tensor.element_size()])
    return folded(digests_of([tensor], [piece for partition in whole for piece in partition]))


def replica_checker(
    named: Named, group: BaseGroup, numbers: Sequence[int] | None = None
) -> ReplicaChecker:
    """Return the detector of parameters, trained or not, that differ between ranks.

    Args:
        numbers: of the group's ranks, for messages, where they are a part of all.
    """
    parameters = [local_part(parameter) for _, parameter in named]
    return ReplicaChecker(
        [name for name, _ in named],
        [parameter.numel() for parameter in parameters],
        [parameter.element_size() for parameter in parameters],
        digests=partial(digests_of, parameters),
        gather=partial(gather_numbers, group),
        ranks=group.size,
        numbers=numbers,
        joint_digests=partial(digests_of, parameters, joint=True),
    )
