"""One loss scale for each window, for float16: the same rule in every engine.

The scale is a power of two, so scaling rounds nothing. Every micro-step of a window uses the same
one; it is taken out once, at the boundary, with the division by the weight. When the summed
gradient overflowed, all ranks see it in the same numbers: they skip the window and halve the scale
alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIRST_SCALE = 2.0**12  # below torch's 2**16, because sums are scaled here and not means
LARGEST_SCALE = 2.0**24
GROW_AFTER = 2000  # windows without overflow; as in torch.amp.GradScaler


class LossScale:
    """The scale of the present window; 1 for ever where `scales` is false."""

    def __init__(self, *, scales: bool) -> None:
        self._scales = scales
        self._scale = FIRST_SCALE if scales else 1.0
        self._calm = 0

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
        if not self._scales:
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
