"""Number formats of a run: autocast for the forward, one loss scale for each window.

The scale is a power of two, so scaling rounds nothing. Every micro-step of a window uses the same
one; it is taken out once, at the boundary, with the division by the weight. When the summed
gradient overflowed, all ranks see it in the same numbers: they skip the window and halve the scale
alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from orchestrator.errors import ConfigError, did_you_mean

_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES = ("float32", "bfloat16", "float16", "float64")
FIRST_SCALE = 2.0**12  # below torch's 2**16, because sums are scaled here and not means
LARGEST_SCALE = 2.0**24
GROW_AFTER = 2000  # windows without overflow; as in torch.amp.GradScaler


class Precision:
    """How a run computes. See `EngineSettings.precision` for the names.

    Raises:
        ConfigError: there is no precision of this name.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        if name not in NAMES:
            raise ConfigError(f"there is no train.precision={name}{did_you_mean(name, NAMES)}")
        self.name, self._device = name, device
        self._scale = FIRST_SCALE if name == "float16" else 1.0
        self._calm = 0

    def forward(self) -> AbstractContextManager[Any]:
        """Within it, forward computations run in the format."""
        dtype = _AUTOCAST.get(self.name)
        return nullcontext() if dtype is None else torch.autocast(self._device.type, dtype)

    @property
    def scale(self) -> float:
        """What losses are multiplied with before the backward; 1 but for float16."""
        return self._scale

    @property
    def may_overflow(self) -> bool:
        """True when a gradient that is not finite can be the scale's fault."""
        return self._scale > 1.0

    def overflowed(self) -> None:
        """The window was skipped: halve the scale."""
        self._scale, self._calm = max(1.0, self._scale / 2), 0

    def succeeded(self) -> None:
        """The window was applied: after many of those, double the scale."""
        if self.name != "float16":
            return
        self._calm += 1
        if self._calm == GROW_AFTER:
            self._scale, self._calm = min(LARGEST_SCALE, self._scale * 2), 0

    def state(self) -> dict[str, float]:
        """What a checkpoint has to hold."""
        return {"scale": self._scale, "calm": self._calm}

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self._scale, self._calm = float(state["scale"]), int(state["calm"])
