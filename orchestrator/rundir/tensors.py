"""Tensors of a safetensors file as numpy arrays, mapped and not loaded.

Why not the safetensors package: its numpy side knows no bfloat16 and no float8. The format is a
length, a JSON header and raw little-endian data (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from orchestrator.errors import UsageError

Array = NDArray[Any]

_HEADER_LIMIT = 100_000_000
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
    "F8_E4M3": ("float8_e4m3", "u1", None),
    "F8_E5M2": ("float8_e5m2", "u1", None),
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
        if self._kind == "BF16":
            # The upper half of a float32.
            return (bits.astype(np.uint32) << 16).view(np.float32)
        if self._kind == "F8_E5M2":
            # The upper half of a float16.
            return (bits.astype(np.uint16) << 8).view(np.float16)
        return _E4M3[bits]


class SafetensorsFile:
    """A file's tensors by name, in name order.

    Raises:
        UsageError: there is no such file, it is damaged, or it has an unknown dtype.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = np.memmap(path, dtype=np.uint8, mode="r")
        except FileNotFoundError:
            raise UsageError(f"there is no weights file {path}") from None
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read as weights: {error}") from error
        begin, header = self._header(data)
        self.tensors = {
            name: self._tensor(name, header[name], data[begin:])
            for name in sorted(header)
            if name != "__metadata__"
        }

    def _header(self, data: Array) -> tuple[int, dict[str, Any]]:
        """Return where the data begin, and the header."""
        length = int.from_bytes(data[:8].tobytes(), "little")
        if data.size < 8 or length > min(_HEADER_LIMIT, data.size - 8):
            raise self._damaged("its header is cut off")
        try:
            header = json.loads(data[8 : 8 + length].tobytes())
        except ValueError:
            raise self._damaged("its header is not JSON") from None
        if not isinstance(header, dict):
            raise self._damaged("its header is not a table")
        return 8 + length, cast("dict[str, Any]", header)

    def _tensor(self, name: str, entry: Any, data: Array) -> Tensor:
        try:
            kind, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
            start, stop = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise self._damaged(f"its entry for {name} is not one of a tensor") from None
        if kind not in _DTYPES:
            raise UsageError(
                f"{self.path}: {name} is of dtype {kind}, which cannot be compared; known are: "
                + ", ".join(sorted(_DTYPES))
            )
        label, stored, _ = _DTYPES[kind]
        if not 0 <= start <= stop <= data.size:
            raise self._damaged(f"{name} ends after the file")
        if (
            stop - start != math.prod(shape) * np.dtype(stored).itemsize
            or min(shape, default=0) < 0
        ):
            raise self._damaged(f"{name} has {stop - start} bytes, not those of its shape")
        # The header need not be a multiple of the item's size long; numpy reads unaligned maps.
        return Tensor(shape, label, kind, data[start:stop].view(stored))

    def _damaged(self, why: str) -> UsageError:
        return UsageError(f"{self.path} is not a safetensors file, or is damaged: {why}")


def _e4m3_table() -> Array:
    """Return the values of all float8 e4m3fn bit patterns (arXiv:2209.05433); none is infinite."""
    bits = np.arange(256)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    size = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * np.exp2(exponent.astype(float) - 10)
    )
    size[(bits & 127) == 127] = np.nan
    return np.where(bits & 128, -size, size).astype(np.float32)


_E4M3 = _e4m3_table()
