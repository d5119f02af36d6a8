"""Tensors of any shape, strides and dtype as what transports take: contiguous real vectors."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

writes_of = attrgetter("_version")
"""How often a tensor was written in place: free to look at, but torch has no public name for it."""


def bytes_of(tensor: Tensor) -> int:
    """Size of its numbers."""
    return tensor.numel() * tensor.element_size()


def reals_of(tensor: Tensor) -> int:
    """Real numbers for each of its entries."""
    return 2 if tensor.is_complex() else 1


def flat_of(tensor: Tensor) -> Tensor:
    """The numbers as a contiguous real vector: a view where the strides allow, else a copy."""
    tensor = tensor.detach()
    # gloo takes no complex numbers; as pairs of reals they sum and travel the same.
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.contiguous().view(-1)


def add_up(out: Tensor, parts: Sequence[Tensor]) -> None:
    """Fill `out` with the sum of `parts`, added in their order; it may be one of them.

    All others but the first are left as they are. Halves are added up in float32, and rounded once.
    """
    if out.dtype in (torch.bfloat16, torch.float16):
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        out.copy_(total)
    elif len(parts) == 1:
        out.copy_(parts[0])
    else:
        total = parts[0]
        for part in parts[1:-1]:
            total = total.add_(part)
        torch.add(total, parts[-1], out=out)


def shaped(flat: Tensor, like: Tensor) -> Tensor:
    """A view of the numbers in the shape and dtype of `like`: the inverse of `flat_of`."""
    if like.is_complex():
        return torch.view_as_complex(flat.view(-1, 2)).view(like.shape)
    return flat.view(like.shape)
