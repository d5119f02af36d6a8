"""Number formats of a run: autocast for the forward, and the loss scale that float16 needs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from orchestrator.engine.common.boundary.loss_scale import LossScale
from orchestrator.errors import ConfigError, did_you_mean

_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES = ("float32", "bfloat16", "float16", "float64")


class Precision(LossScale):
    """How a run computes. See `EngineSettings.precision` for the names.

    Raises:
        ConfigError: there is no precision of this name.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        if name not in NAMES:
            raise ConfigError(f"there is no train.precision={name}{did_you_mean(name, NAMES)}")
        super().__init__(scales=name == "float16")
        self.name, self._device = name, device

    def forward(self) -> AbstractContextManager[Any]:
        """Within it, forward computations run in the format."""
        dtype = _AUTOCAST.get(self.name)
        return nullcontext() if dtype is None else torch.autocast(self._device.type, dtype)
