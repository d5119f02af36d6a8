"""The norm of the whole gradient, and the one factor that averages, unscales and clips it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_CHUNK = 4096  # numbers summed in the gradient's own dtype before float64 takes over
EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_, so that clipping agrees with it


def norm_of(gradients: Sequence[Tensor]) -> float:
    """The 2-norm of all numbers of the flat `gradients`; NaN or infinite when one of them is.

    Norms of chunks are added up in float64: as exact as float64 throughout, at a float32's price.
    """
    squares = 0.0
    for gradient in gradients:
        whole = gradient.numel() // _CHUNK * _CHUNK
        parts = [gradient[whole:]]
        if whole:
            parts.append(torch.linalg.vector_norm(gradient[:whole].view(-1, _CHUNK), dim=1))
        for part in parts:
            norm = float(torch.linalg.vector_norm(part, dtype=torch.float64))
            squares += norm * norm
    norm = math.sqrt(squares)
    if not math.isfinite(norm) and all(bool(g.isfinite().all()) for g in gradients):
        # The squares overflowed, the numbers did not: scale by the largest.
        largest = max(float(g.abs().max()) for g in gradients if g.numel())
        scaled = [torch.linalg.vector_norm(g.double() / largest) for g in gradients]
        norm = largest * math.sqrt(sum(float(s) ** 2 for s in scaled))
    return norm


def factor_for(norm: float, divisor: float, clip_norm: float | None) -> tuple[float, float]:
    """(norm of the averaged gradient, factor to multiply the summed one with).

    Args:
        norm: of the summed gradient.
        divisor: the window's weight, times the loss scale.
        clip_norm: largest norm of the averaged gradient, or None.

    >>> factor_for(8.0, 4.0, None)
    (2.0, 0.25)
    """
    averaged = norm / divisor
    if clip_norm is None:
        return averaged, 1.0 / divisor
    return averaged, min(1.0, clip_norm / (averaged + EPSILON)) / divisor
