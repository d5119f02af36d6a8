"""Tells a loss that is a mean from a sum, where its graph says so.

`Loss` wants sums, and a mean is the commonest slip: `cross_entropy` gives one unless it is told
otherwise. The last operations of its graph tell, at the price of looking at a name or two.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_MEAN = 1  # as `torch.nn.functional` numbers its reductions
_ONLY_PASS = ("ToCopy", "Clone", "View", "Squeeze", "Unsqueeze", "Alias", "ReshapeAlias", "Div")
_SUMS = ("Add", "Sub")
_DEEPEST = 8


def averaged_by(total: Tensor) -> str | None:
    """The operation that made `total` a mean, in words; None where it is none, or cannot be told.

    A mean that was multiplied afterwards is nobody's business: it may be a sum again.

    >>> import torch
    >>> x = torch.ones(4, requires_grad=True)
    >>> averaged_by(x.mean() / 2), averaged_by(x.mean() * 4), averaged_by(x.sum())
    ('mean()', None, None)
    """
    return _averaged(total.grad_fn, _DEEPEST)


def _averaged(node: Any, depth: int) -> str | None:
    if node is None or not depth:
        return None
    name = node.name().partition("Backward")[0]
    if name == "Mean":
        return "mean()" if _numbers(node) != 1 else None
    if getattr(node, "_saved_reduction", None) == _MEAN:
        return f"{name}(reduction='mean')"
    if name in _ONLY_PASS or name in _SUMS:
        parts = [part for part, _ in node.next_functions if part is not None]
    else:
        parts = []
    if name in _ONLY_PASS and len(parts) == 1:
        return _averaged(parts[0], depth - 1)
    if name in _SUMS and parts:
        found = [_averaged(part, depth - 1) for part in parts]
        return found[0] if all(found) else None
    return None


def _numbers(node: Any) -> int | None:
    """How many numbers a `mean()` was taken of, if it tells."""
    return getattr(node, "_saved_self_sym_numel", None)
