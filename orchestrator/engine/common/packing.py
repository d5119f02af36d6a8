"""State dictionaries as plain JSON, with their tensors apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from orchestrator.errors import JobError


def pack(value: Any, tensors: dict[str, Any], path: str, tensor: type) -> Any:
    """`value` as what JSON can hold, with its tensors moved to `tensors` under their paths.

    >>> pack({"betas": (0.9, 0.5)}, {}, "", type(None))
    {'items': [['betas', {'tuple': [0.9, 0.5]}]]}

    Args:
        tensor: the framework's class of tensors.

    Raises:
        JobError: it holds something that neither JSON nor safetensors can.
    """
    if isinstance(value, tensor):
        while path in tensors:  # as of {"a.b": …, "a": {"b": …}}
            path += "'"
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, Mapping):
        items: Mapping[Any, Any] = value
        if all(isinstance(key, (str, int)) for key in items):
            return {
                "items": [
                    [k, pack(v, tensors, f"{path}.{k}".lstrip("."), tensor)]
                    for k, v in items.items()
                ]
            }
    if isinstance(value, (list, tuple)):
        entries: list[Any] | tuple[Any, ...] = value
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [pack(v, tensors, f"{path}.{n}", tensor) for n, v in enumerate(entries)]}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        # As from a table of rates. With its type, on which later arithmetic depends.
        scalar: Any = value.item()
        return {"numpy": [value.dtype.name, pack(scalar, tensors, path, tensor)]}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        # JSON has no NaN or infinity; hexadecimal keeps every bit of all the others as well.
        return value if value - value == 0 else {"float": str(value)}
    raise JobError(
        f"the state at '{path}' holds a {type(value).__name__}, which cannot be saved without "
        "pickling; keep tensors, numbers, strings, lists and dicts there"
    )


def unpack(packed: Any, tensors: Mapping[str, Any]) -> Any:
    """Undo `pack`."""
    if not isinstance(packed, Mapping):
        return packed
    [(kind, content)] = packed.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "float":
        return float(content)
    if kind == "numpy":
        name, scalar = content
        return np.dtype(name).type(unpack(scalar, tensors))
    if kind == "items":
        return {key: unpack(value, tensors) for key, value in content}
    entries = [unpack(value, tensors) for value in content]
    return tuple(entries) if kind == "tuple" else entries
