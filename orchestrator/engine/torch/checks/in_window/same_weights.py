"""Do all ranks have the same weights? A cheap digest, for `engine.common.replicas`, where they are:
a sum, modulo 2**64, of their bits times odd numbers.

Each place has its own odd 64-bit number, so any change of one number changes the sum, and so do two
that change places; some 5 GB/s on a CPU core, and nothing but the sums leaves a device. Whole
numbers add up alike in any order. It tells ranks that drifted apart, not somebody who means it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from orchestrator.engine.common.replicas import LARGEST_PIECE, Piece, Replicas
from orchestrator.engine.torch.comm.base_group import BaseGroup
from orchestrator.engine.torch.comm.gathered import numbers_of_all

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_ODD = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: its multiples are spread evenly
_MIX = 0xBF58476D1CE4E5B9  # of SplitMix64 [Steele, Lea and Flood 2014]


def replicas_of(named: Sequence[tuple[str, Tensor]], group: BaseGroup) -> Replicas:
    """What watches over the equality of these parameters on the ranks of `group`."""
    parameters = [parameter for _, parameter in named]
    digests = digests_of(parameters)
    return Replicas(
        [name for name, _ in named],
        [parameter.numel() for parameter in parameters],
        [parameter.element_size() for parameter in parameters],
        digests=digests,
        gather=partial(numbers_of_all, group),
        ranks=group.size,
        digests_told=partial(joined_digests, parameters, digests),
    )


def digests_of(parameters: Sequence[Tensor]) -> Callable[[Sequence[Piece]], list[int]]:
    """A function that gives the digest of each of some pieces, as the parameters are then."""

    def digests(pieces: Sequence[Piece]) -> list[int]:
        sums = [_digest(_bits(parameters, piece)) for piece in pieces]
        if len({one.device for one in sums}) > 1:
            return [int(one) for one in sums]
        return torch.stack(sums).tolist()  # one wait for the device, not one a piece

    return digests


def joined_digests(
    parameters: Sequence[Tensor],
    digests: Callable[[Sequence[Piece]], list[int]],
    pieces: Sequence[Piece],
) -> list[int]:
    """One digest of small pieces, laid one after the other; those of the pieces where they are not
    small, or not alike.
    """
    if sum(piece.end - piece.start for piece in pieces) > LARGEST_PIECE:
        return digests(pieces)
    parts = [_bits(parameters, piece) for piece in pieces]
    if len({(part.device, part.dtype) for part in parts}) > 1:
        return digests(pieces)
    return [int(_digest(torch.cat(parts)))]


def _bits(parameters: Sequence[Tensor], piece: Piece) -> Tensor:
    flat = parameters[piece.number].detach().reshape(-1)[piece.start : piece.end]
    numbers = torch.view_as_real(flat.resolve_conj()).reshape(-1) if flat.is_complex() else flat
    return numbers.view(_BITS[min(numbers.element_size(), 4)])


def _digest(bits: Tensor) -> Tensor:
    return (bits * _multipliers(bits.device)[: len(bits)]).sum()


@lru_cache(maxsize=8)
def _multipliers(device: torch.device) -> Tensor:
    """Odd 64-bit numbers, the same on every machine: as many as the largest piece may need."""
    places = torch.arange(1, 4 * LARGEST_PIECE + 1, dtype=torch.int64)
    mixed = places * _signed(_ODD)
    mixed = (mixed ^ (mixed >> 30)) * _signed(_MIX)
    return ((mixed ^ (mixed >> 27)) | 1).to(device)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
