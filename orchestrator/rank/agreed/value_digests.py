"""Digests of values of any kind: samples, as data sets give them. No framework is imported."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from typing import Any

_BITS = 48  # a float64 carries them exactly
_DEEPEST = 8


def digests_of(value: Any) -> tuple[int, int]:
    """Two numbers of 48 bits: of its structure (types, keys, shapes) and of its contents.

    Numbers, text, bytes, tensors, arrays, mappings, sequences, and objects by their fields are
    looked into; of anything else the type counts alone.

    >>> same = digests_of({"x": [1, 2.0]}), digests_of({"x": [1, 2.0]})
    >>> same[0] == same[1], digests_of([1])[0] == digests_of([2])[0]
    (True, True)
    >>> digests_of([1])[1] == digests_of([2])[1]
    False
    """
    structure, contents = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
    for what, data in _parts(value, 0):
        structure.update(f"{what};{len(data)};".encode())
        contents.update(data)
    return _number(structure.digest()), _number(contents.digest())


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "little") >> (64 - _BITS)


def _parts(value: Any, depth: int) -> Iterator[tuple[str, bytes]]:
    """What a value consists of, in order: (kind, bytes)."""
    kind = type(value).__name__
    if isinstance(value, bytes | bytearray | memoryview):
        yield kind, bytes(value)
    elif isinstance(value, str):
        yield kind, value.encode("utf-8", "surrogatepass")
    elif isinstance(value, bool | int | float | complex) or value is None:
        yield kind, repr(value).encode().ljust(32)
    elif (array := _as_array(value)) is not None:
        yield f"{kind} {array.dtype} {array.shape}", array.tobytes()
    elif depth < _DEEPEST:
        inner = list(_within(value))
        yield f"{kind} of {len(inner)}", b""
        for name, one in inner:
            yield name, b""
            yield from _parts(one, depth + 1)
    else:
        yield kind, b""


def _within(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), one) for key, one in value.items())
    elif isinstance(value, AbstractSet):
        yield from (("", one) for one in sorted(value, key=repr))
    elif isinstance(value, list | tuple):
        yield from (("", one) for one in value)
    elif is_dataclass(value):
        yield from ((field.name, getattr(value, field.name)) for field in fields(value))
    else:
        yield from sorted(getattr(value, "__dict__", {}).items())


def _as_array(value: Any) -> Any:
    """A tensor's, array's or picture's numbers; None for what has none, or only references."""
    import numpy as np

    torch: Any = sys.modules.get("torch")
    if torch and isinstance(value, torch.Tensor):
        dense: Any = value.detach().to_dense() if value.layout != torch.strided else value.detach()
        # NumPy has no bfloat16, nor conjugates that are still to be taken.
        dense = dense.float() if dense.dtype == torch.bfloat16 else dense.resolve_conj()
        value = dense.resolve_neg().cpu().numpy()
    elif hasattr(value, "asnumpy"):  # MindSpore's
        value = value.asnumpy()
    if not (hasattr(value, "__array__") or hasattr(value, "__array_interface__")):
        return None
    array = np.asarray(value)
    return None if array.dtype.hasobject else np.ascontiguousarray(array)
