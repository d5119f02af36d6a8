"""Weights to start from, read from a safetensors file of either engine: any run's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load_file

from orchestrator.errors import DataError


def read_weights(path: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the arrays of these names and shapes.

    Raises:
        DataError: there is no such file, it is no safetensors file, or not of this model.
    """
    file = Path(path).expanduser()
    try:
        found = load_file(file)
    except FileNotFoundError:
        raise DataError(f"job.initial_weights={path}: there is no such file") from None
    except (SafetensorError, OSError) as error:
        raise DataError(f"job.initial_weights={path} cannot be read: {error}") from error
    for name, shape in shapes.items():
        if name not in found or found[name].shape != tuple(shape):
            there = list(found[name].shape) if name in found else "nothing"
            raise DataError(
                f"job.initial_weights={path} is of another model: {name} must be {list(shape)}, "
                f"but there is {there}"
            )
    return {name: found[name] for name in shapes}
