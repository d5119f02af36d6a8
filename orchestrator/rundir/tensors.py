"""Tensors of a safetensors file, or of a checkpoint in parts, as numpy arrays, mapped and not
loaded.

The safetensors package checks the file, but its numpy side knows no bfloat16, so the values are
read here. The format is a length, a JSON header and raw little-endian data
(https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from orchestrator.errors import UsageError
from orchestrator.rundir.checkpoints import EXTRA, MODEL, PARTS, SHARDS

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
    kind: str  # the dtype's name in the file
    pieces: tuple[tuple[int, Array], ...]  # each one's first element, and its stored bits

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def bits(self, start: int, stop: int) -> Array:
        """Return the stored bits as unsigned integers."""
        slices = [bits[max(0, start - at) : max(0, stop - at)] for at, bits in self.pieces]
        return np.asarray(slices[0]) if len(slices) == 1 else np.concatenate(slices)

    def values(self, start: int, stop: int) -> Array:
        """Return the numbers, in a numpy dtype that holds each of them exactly."""
        bits = self.bits(start, stop)
        readable = _DTYPES[self.kind][2]
        if readable is not None:
            return bits.view(readable)
        return (bits.astype(np.uint32) << 16).view(np.float32)  # the upper half of a float32


class SafetensorsFile:
    """A file's tensors by name, in name order; of a checkpoint folder in parts, the model's.

    Attributes:
        aliases: further names of tensors that the file holds once, and the names that they have.

    Raises:
        UsageError: there is no such file, it is damaged, or it has an unknown dtype.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.aliases: dict[str, str] = {}
        tensors: dict[str, Tensor] = {}
        parts = sorted(path.glob(PARTS))
        for part in parts:
            self._add_shards(tensors, part)
        if not parts:
            header, data = _mapped(path)
            metadata = header.pop("__metadata__", {})
            self.aliases = json.loads(metadata.get(EXTRA, "{}")).get("aliases", {})
            for name, entry in header.items():
                tensors[name] = self._tensor(name, entry, data)
        self.tensors = dict(sorted(tensors.items()))

    def _tensor(self, name: str, entry: dict[str, Any], data: Array, first: int = 0) -> Tensor:
        kind = str(entry["dtype"])
        if kind not in _DTYPES:
            raise UsageError(
                f"{self.path}: {name} is of dtype {kind}, which cannot be compared; known are: "
                + ", ".join(sorted(_DTYPES))
            )
        label, stored, _ = _DTYPES[kind]
        # The header need not be a multiple of the item's size long; numpy reads unaligned maps.
        piece = data[slice(*entry["data_offsets"])].view(stored)
        return Tensor(tuple(entry["shape"]), label, kind, ((first, piece),))

    def _add_shards(self, tensors: dict[str, Tensor], part: Path) -> None:
        """Add one rank's shards, each some rows of a tensor."""
        header, data = _mapped(part)
        offsets = json.loads(header.pop("__metadata__")[SHARDS])
        for name in [name for name in header if name.startswith(MODEL)]:
            shape, (row, *others) = header[name]["shape"], offsets[name]["saved_offsets"] or [0]
            if any(others):
                raise UsageError(
                    f"{self.path}: {name} is sharded along another dimension than its first; "
                    "`orchestrator export RUN --safetensors` makes one file of the run's weights"
                )
            shard = self._tensor(name, header[name], data, row * math.prod(shape[1:]))
            other = tensors.get(key := name.removeprefix(MODEL))
            if other is not None:
                rows = max(other.shape[0], row + shape[0])
                pieces = sorted((*other.pieces, *shard.pieces), key=lambda piece: piece[0])
                shard = replace(shard, shape=(rows, *shape[1:]), pieces=tuple(pieces))
            tensors[key] = shard

    def write(self, path: Path) -> None:
        """Write all tensors to one safetensors file."""
        header, end = dict[str, Any](), 0
        for name, tensor in self.tensors.items():
            size = tensor.size * np.dtype(_DTYPES[tensor.kind][1]).itemsize
            offsets = [end, end := end + size]
            header[name] = {"dtype": tensor.kind, "shape": tensor.shape, "data_offsets": offsets}
        text = json.dumps(header).encode()
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in self.tensors.values():
                for _, bits in tensor.pieces:
                    file.write(bits.data)


def _mapped(path: Path) -> tuple[dict[str, Any], Array]:
    """Return a file's header, and its mapped data. Raises `UsageError`."""
    try:
        with safe_open(path, framework="numpy"):  # checks the header against the file's size
            data = np.memmap(path, dtype=np.uint8, mode="r")
    except FileNotFoundError:
        raise UsageError(f"there is no weights file {path}") from None
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path} is not a safetensors file, or is damaged: {error}") from error
    begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
    return json.loads(data[8:begin].tobytes()), data[begin:]
