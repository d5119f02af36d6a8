"""State on disk: weights and optimizer as safetensors, which every framework reads."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, ops
from safetensors.numpy import load_file, save_file

from orchestrator.engine.common.job_checks import check_fits
from orchestrator.errors import RunFolderError, did_you_mean

WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"


def arrays_of(parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    """Return copies of the parameters as contiguous arrays, in the order of the names."""
    return {name: np.array(parameters[name].asnumpy(), order="C") for name in sorted(parameters)}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of the state of one moment, to be written from any thread."""

    files: Mapping[str, dict[str, Any]]
    extra: dict[str, Any]

    def take(self) -> None:
        """Nothing is left to be copied."""

    def save_state(self, folder: Path) -> dict[str, Any]:
        """Write the safetensors files; give the rest as what JSON can hold."""
        for name, arrays in self.files.items():
            save_file(arrays, str(folder / name))
        return self.extra


def load(path: Path, parameters: Mapping[str, Parameter]) -> None:
    """Set the parameters to a file's, bit for bit.

    Raises `RunFolderError` when names or shapes are not the model's.
    """
    found = load_file(str(path))
    for name in parameters:
        if name not in found:
            raise RunFolderError(f"{path} has no {name}{did_you_mean(name, found)}")
    for name, array in found.items():
        if name not in parameters:
            raise RunFolderError(
                f"{path} has {name}, which this model has not{did_you_mean(name, parameters)}"
            )
        held = parameters[name]
        if tuple(array.shape) != tuple(held.shape):
            raise RunFolderError(
                f"{path}: {name} has the shape {tuple(array.shape)}, but this model's has "
                f"{tuple(held.shape)}"
            )
        ops.assign(held, Tensor(array, held.dtype))  # see `model.set_rate`


def load_weights(path: Path, parameters: Mapping[str, Parameter]) -> None:
    """Set the parameters to a file's. Raises `ConfigError` when it is another model's."""
    found = load_file(str(path))
    check_fits(
        path,
        {name: (array.dtype.name, tuple(array.shape)) for name, array in found.items()},
        {name: (str(p.dtype).lower(), tuple(p.shape)) for name, p in parameters.items()},
    )
    load(path, parameters)


def digest(parameters: Mapping[str, Parameter]) -> str:
    """SHA-256 over the parameters' bytes, tensor by tensor in the order of the names."""
    whole = hashlib.sha256()
    for array in arrays_of(parameters).values():
        whole.update(array.tobytes())
    return whole.hexdigest()
