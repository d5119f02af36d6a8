"""Notices a model whose parameters are no longer those that an accumulator was built for.

A layer that was added or replaced, a state dict that was loaded with assign=True, a cast: gradients
would go to tensors that nobody reduces and no optimizer steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from orchestrator.errors import JobError

_VALUES = methodcaller("values")


class SameModel:
    """The tree of modules and parameters of one model, as it was.

    Args:
        model: a module; of anything else only the parameters are looked at.
        trained: its trained parameters, with names.
    """

    def __init__(self, model: Any, trained: Sequence[tuple[str, Tensor]]) -> None:
        self._tables: list[tuple[str, Mapping[str, Any], tuple[Any, ...]]] = []
        if isinstance(model, Module):
            for name, layer in model.named_modules():
                for table in (layer._modules, layer._parameters):  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  # to walk it anew would take longer
                    if table:
                        self._tables.append((name, table, tuple(table.values())))
        self._contents = [table for _, table, _ in self._tables]
        self._lengths = [len(before) for _, _, before in self._tables]
        self._values = [value for _, _, before in self._tables for value in before]
        self._trained = trained
        self._addresses = [parameter.data_ptr() for _, parameter in trained]
        self._kinds = [_kind(parameter) for _, parameter in trained]

    def check(self) -> None:
        """Raise `JobError` if a layer or parameter is another one, or is kept otherwise."""
        now = chain.from_iterable(map(_VALUES, self._contents))
        if [*map(len, self._contents)] != self._lengths or not all(map(is_, now, self._values)):
            self._check_tables()
        addresses = [parameter.data_ptr() for _, parameter in self._trained]
        if addresses != self._addresses:
            self._check_kinds()
            self._addresses = addresses

    def _check_tables(self) -> None:
        for name, table, before in self._tables:
            if len(table) != len(before) or not all(map(is_, table.values(), before)):
                changed = [key for key, value in table.items() if not _is_one_of(value, before)]
                where = ".".join(part for part in (name, *changed[:1]) if part)
                raise JobError(
                    f"{where or 'the model'} is not what it was when the accumulator was built: a "
                    "layer or parameter was added, taken away or replaced (by a new head, or "
                    "load_state_dict(assign=True), say). close() this accumulator and build "
                    "another one, with an optimizer of the parameters that there are now"
                )

    def _check_kinds(self) -> None:
        for (name, parameter), before in zip(self._trained, self._kinds, strict=True):
            now = _kind(parameter)
            if now != before:
                raise JobError(
                    f"parameter {name} became {_words(now)} after the accumulator was built, when "
                    f"it was {_words(before)}: its gradients are kept as that. Cast or move a "
                    "model before its optimizer and accumulator are built"
                )


def _is_one_of(value: Any, values: Sequence[Any]) -> bool:
    return any(value is one for one in values)


_Kind = tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]]


def _kind(parameter: Tensor) -> _Kind:
    return parameter.dtype, parameter.device, parameter.shape, parameter.stride()


def _words(kind: _Kind) -> str:
    dtype, device, shape, strides = kind
    return f"{dtype} on {device} of shape {tuple(shape)} and strides {strides}"
