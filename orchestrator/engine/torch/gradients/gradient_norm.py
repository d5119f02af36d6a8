"""The norm of the whole gradient."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_CHUNK = 4096  # numbers summed in the gradient's own dtype before float64 takes over
_HALVES = (torch.float16, torch.bfloat16)


class GradientNorm:
    """The 2-norm of numbers that come in flat pieces, each looked at as it comes.

    Norms of chunks are added up in float64: as exact as float64 throughout, at a float32's price.
    The pieces are kept until `value`, since they may have to be looked at again.
    """

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []
        self._norms: list[Tensor] = []

    def add(self, piece: Tensor) -> None:
        """Take in a flat piece, on its device; nothing is waited for."""
        self._pieces.append(piece)
        whole = piece.numel() // _CHUNK * _CHUNK
        if whole:
            wide = torch.float32 if piece.dtype in _HALVES else None
            chunks = torch.linalg.vector_norm(piece[:whole].view(-1, _CHUNK), dim=1, dtype=wide)
            self._norms.append(torch.linalg.vector_norm(chunks, dtype=torch.float64))
        self._norms.append(torch.linalg.vector_norm(piece[whole:], dtype=torch.float64))

    def value(self) -> float:
        """The norm; NaN or infinite when a number is."""
        norm = math.sqrt(sum(part * part for part in _floats(self._norms)))
        if not math.isfinite(norm) and all(bool(p.isfinite().all()) for p in self._pieces):
            # The squares overflowed, the numbers did not: scale by the largest.
            largest = max(float(p.abs().max()) for p in self._pieces if p.numel())
            scaled = [torch.linalg.vector_norm(p.double() / largest) for p in self._pieces]
            norm = largest * math.sqrt(sum(s * s for s in _floats(scaled)))
        return norm


def _floats(numbers: list[Tensor]) -> list[float]:
    """With one transfer from each device."""
    if all(number.is_cpu for number in numbers):
        return [float(number) for number in numbers]
    found: list[float] = []
    for device in dict.fromkeys(number.device for number in numbers):
        found += torch.stack([n for n in numbers if n.device == device]).tolist()
    return found
