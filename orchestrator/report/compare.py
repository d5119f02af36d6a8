"""Differences between two runs: their final weights, and what computed them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from orchestrator.errors import UsageError
from orchestrator.report.terminal import literal, new_table, say
from orchestrator.rundir.tensors import SafetensorsFile, Tensor
from orchestrator.units import first_few, plural

PIECE = 1 << 20

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class TensorComparison:
    """One tensor against its namesake. Differences are those of the values, in float64.

    A NaN (or an infinity) equals only the same bits: anything else is infinitely far from it.
    """

    max_relative_difference: float
    max_absolute_difference: float
    equal_bits: bool
    shape: tuple[int, ...]
    dtype: str

    @property
    def is_counter(self) -> bool:
        """True for one integer, as batch norm counts its batches: no weight is far from another
        because it was counted on other ranks.
        """
        return self.shape == () and "float" not in self.dtype and "complex" not in self.dtype


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two files. `max_relative_difference` is the largest over tensors but for counters; 0 when
    both are all zero, infinite when only the reference is. `equal_bits` is about all of them.
    """

    max_relative_difference: float
    equal_bits: bool
    tensors: Mapping[str, TensorComparison]


def compare(a: Path, b: Path) -> Comparison:
    """Compare the weights in file `a` with the reference `b`.

    Raises:
        UsageError: a file is missing or is not a safetensors file, or names or shapes differ.
    """
    files = SafetensorsFile(a), SafetensorsFile(b)
    weights, reference = files[0].tensors, files[1].tensors
    # Tied weights have one name in a file, and all of their names in a checkpoint in parts.
    for file, other in (files, reversed(files)):
        for alias, name in file.aliases.items():
            if alias in other.tensors:
                file.tensors[alias] = file.tensors[name]
    problems = {
        f"only in {a}": weights.keys() - reference.keys(),
        f"only in {b}": reference.keys() - weights.keys(),
        "of different shapes": [
            f"{name} {list(weights[name].shape)} and {list(reference[name].shape)}"
            for name in weights.keys() & reference.keys()
            if weights[name].shape != reference[name].shape
        ],
    }
    sentences = [f"{what}: {', '.join(sorted(names))}" for what, names in problems.items() if names]
    if sentences:
        raise UsageError("the weights are not of the same model: " + "; ".join(sentences))
    tensors = {name: _compare(weights[name], reference[name]) for name in weights}
    return Comparison(
        max_relative_difference=max(
            (t.max_relative_difference for t in tensors.values() if not t.is_counter), default=0.0
        ),
        equal_bits=all(t.equal_bits for t in tensors.values()),
        tensors=tensors,
    )


def _compare(a: Tensor, b: Tensor) -> TensorComparison:
    largest_difference = largest_value = 0.0
    equal_bits = a.dtype == b.dtype
    for start in range(0, a.size, PIECE):
        stop = min(start + PIECE, a.size)
        if a.dtype == b.dtype:
            same = a.bits(start, stop) == b.bits(start, stop)
            equal_bits = equal_bits and bool(same.all())
        else:
            same = np.zeros(stop - start, dtype=bool)
        difference, value = _distances(a.values(start, stop), b.values(start, stop), same)
        largest_difference = max(largest_difference, difference)
        largest_value = max(largest_value, value)
    relative = largest_difference / largest_value if largest_value else math.inf
    return TensorComparison(
        max_relative_difference=relative if largest_difference else 0.0,
        max_absolute_difference=largest_difference,
        equal_bits=equal_bits,
        shape=a.shape,
        dtype=a.dtype if a.dtype == b.dtype else f"{a.dtype} and {b.dtype}",
    )


def _distances(a: Array, b: Array, same: Array) -> tuple[float, float]:
    """Return (largest |a-b|, largest finite |b|) of one piece; `same` marks equal bits."""
    if a.dtype.kind in "iu" and b.dtype == a.dtype:
        # Unsigned arithmetic wraps, so this is exact where a float64 or an int64 would not be.
        above, below = np.maximum(a, b).astype(np.uint64), np.minimum(a, b).astype(np.uint64)
        return float((above - below).max()), _size(b.astype(np.float64))
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    # Signalling NaNs make even a cast complain.
    with np.errstate(invalid="ignore", over="ignore"):
        a, b = a.astype(wide), b.astype(wide)
        distance = np.abs(a - b)
    finite = np.isfinite(a) & np.isfinite(b)
    distance[~finite] = np.inf
    distance[same | (~finite & (a == b))] = 0.0
    return float(distance.max()), _size(b[np.isfinite(b)])


def _size(values: Array) -> float:
    return float(np.abs(values).max(initial=0.0))


def print_comparison(comparison: Comparison, console: Console, *, tensors: bool = False) -> None:
    """Print what `compare` found; with `tensors`, one row for each, the farthest apart first."""
    count = plural(len(comparison.tensors), "tensor")
    if comparison.equal_bits:
        say(console, f"the same bits in all of {count}", "bold green")
    else:
        largest = f"{comparison.max_relative_difference:.3e}"
        say(console, f"largest relative difference: {largest} (max|a-b| / max|b|)", "bold")
        unlike = sum(not tensor.equal_bits for tensor in comparison.tensors.values())
        say(console, f"{unlike} of {count} differ in some bit")
        counters = [n for n, t in comparison.tensors.items() if t.is_counter and not t.equal_bits]
        if counters:
            say(console, f"of them counters, not compared above: {first_few(sorted(counters), 3)}")
    if tensors and comparison.tensors:
        table = new_table(("tensor", "shape", "dtype", "relative", "absolute"), right=(3, 4))
        for name, tensor in sorted(
            comparison.tensors.items(), key=lambda item: -item[1].max_relative_difference
        ):
            same = tensor.equal_bits
            relative = "same bits" if same else f"{tensor.max_relative_difference:.3e}"
            absolute = "0" if same else f"{tensor.max_absolute_difference:.3e}"
            row = (name, str(list(tensor.shape)), tensor.dtype, relative, absolute)
            table.add_row(*(literal(text, console) for text in row))
        console.print(table)
