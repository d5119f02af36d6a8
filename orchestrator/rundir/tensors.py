"""Tensors of a safetensors file as numpy arrays, mapped and not loaded.

The safetensors package checks the file, but its numpy side knows no bfloat16, so the values are
read here. The format is a length, a JSON header and raw little-endian data
(https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from orchestrator.errors import UsageError

Array = NDArray[Any]

# Name in the file: (name for people, dtype of the stored bits, dtype to read values with).
_DTYPES: dict[str, tuple[str, str, str | None]] = {
    "BOOL": ("bool", "u1", "u1"),
    "U8": ("uint8", "u1", "u1"),
    "I8": ("int8", "u1", "i1"),
    "U16": ("uint16", "<u2", "<u2"),
    "I16": ("int16", "<u2", "<i2"),
    "U32": ("uint32", "<u4", "<u4"),
    "I32": ("int32", "<u4", "<i4"),
    "U64": ("uint64", "<u8", "<u8"),
    "I64": ("int64", "<u8", "<i8"),
    "F16": ("float16", "<u2", "<f2"),
    "F32": ("float32", "<u4", "<f4"),
    "F64": ("float64", "<u8", "<f8"),
    "BF16": ("bfloat16", "<u2", None),
    # Pairs of bits: (real, imaginary).
    "C64": ("complex64", "<u8", "<c8"),
}


@dataclass(frozen=True)
class Tensor:
    """One tensor, flat; `bits` and `values` give pieces of it without reading the rest."""

    shape: tuple[int, ...]
    dtype: str
    _kind: str
    _stored: Array

    @property
    def size(self) -> int:
        """The number of elements."""
        return self._stored.size

    def bits(self, start: int, stop: int) -> Array:
        """Return the stored bits as unsigned integers."""
        return np.asarray(self._stored[start:stop])

    def values(self, start: int, stop: int) -> Array:
        """Return the numbers, in a numpy dtype that holds each of them exactly."""
        bits = self.bits(start, stop)
        readable = _DTYPES[self._kind][2]
        if readable is not None:
            return bits.view(readable)
        return (bits.astype(np.uint32) << 16).view(np.float32)  # the upper half of a float32


class SafetensorsFile:
    """A file's tensors by name, in name order.

    Raises:
        UsageError: there is no such file, it is damaged, or it has an unknown dtype.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(path, framework="numpy"):  # checks the header against the file's size
                data = np.memmap(path, dtype=np.uint8, mode="r")
        except FileNotFoundError:
            raise UsageError(f"there is no weights file {path}") from None
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{path} is not a safetensors file, or is damaged: {error}") from error
        begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
        header: dict[str, Any] = json.loads(data[8:begin].tobytes())
        header.pop("__metadata__", None)
        self.tensors = {
            name: self._tensor(name, entry, data[begin:]) for name, entry in sorted(header.items())
        }

    def _tensor(self, name: str, entry: dict[str, Any], data: Array) -> Tensor:
        kind = str(entry["dtype"])
        if kind not in _DTYPES:
            raise UsageError(
                f"{self.path}: {name} is of dtype {kind}, which cannot be compared; known are: "
                + ", ".join(sorted(_DTYPES))
            )
        label, stored, _ = _DTYPES[kind]
        # The header need not be a multiple of the item's size long; numpy reads unaligned maps.
        piece = data[slice(*entry["data_offsets"])].view(stored)
        return Tensor(tuple(entry["shape"]), label, kind, piece)
