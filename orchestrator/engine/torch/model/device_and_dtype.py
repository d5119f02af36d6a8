"""Where and as what models and batches are computed: device, float64, deterministic kernels."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

_DOUBLE = {torch.complex32: torch.complex128, torch.complex64: torch.complex128}


def double_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype of 64 bits a number that goes with `dtype`; integers stay what they are.

    >>> double_of(torch.float32), double_of(torch.complex64), double_of(torch.int32)
    (torch.float64, torch.complex128, torch.int32)
    """
    return torch.float64 if dtype.is_floating_point else _DOUBLE.get(dtype, dtype)


def doubled(model: Module) -> Module:
    """`model` with all its floating and complex tensors in double precision, in place.

    `Module.double` leaves complex ones alone.
    """
    return model._apply(lambda tensor: tensor.to(double_of(tensor.dtype)))  # noqa: SLF001  # no public name  # pyright: ignore[reportPrivateUsage]


def moved(batch: Any, device: torch.device, *, double: bool = False) -> Any:
    """`batch` on `device`, in double precision when asked; containers keep their type."""
    if isinstance(batch, Tensor):
        dtype = double_of(batch.dtype) if double else batch.dtype
        return batch.to(device, dtype, non_blocking=True)
    if isinstance(batch, Mapping):
        entries: Mapping[Any, Any] = batch
        return {key: moved(value, device, double=double) for key, value in entries.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*(moved(value, device, double=double) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(moved(value, device, double=double) for value in batch)
    return batch.to(device) if hasattr(batch, "to") else batch


def be_deterministic() -> None:
    """Have torch use kernels that give the same bits each time, and refuse those that cannot."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    torch.use_deterministic_algorithms(mode=True)
    # It fills new tensors with NaN to find other bugs; that costs time and changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a module that acts as an object
    torch.backends.cudnn.benchmark = False
