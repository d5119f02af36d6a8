"""Number formats of a run: MindSpore's automatic casts around the loss, and float16's loss scale.

Weights, gradients and sums stay float32; inside the loss, operators of MindSpore's own white list
(matrix products, convolutions) compute in the half format, those of its black list do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, amp, ops

from orchestrator.engine.common.boundary.loss_scale import LossScale
from orchestrator.errors import ConfigError

HALVES = {"float16": ms.float16, "bfloat16": ms.bfloat16}
CHECK_TOLERANCE, HALF_TOLERANCE = 1e-3, 5e-2


class Precision(LossScale):
    """How a run computes. See `EngineSettings.precision` for the names.

    Attributes:
        tolerance: how far two ways to compute a gradient may differ, relative to its largest part.

    Raises:
        ConfigError: the transport's device cannot compute in that format.
    """

    def __init__(self, name: str = "float32", transport: str = "mccl") -> None:
        if name == "bfloat16" and transport == "mccl":
            raise ConfigError(
                "train.precision=bfloat16 cannot be computed by MindSpore on a CPU, which has no "
                "matrix product for it; try train.precision=float16, or transport=hccl or nccl"
            )
        super().__init__(scales=name == "float16")
        self._half: Any = HALVES.get(name)
        self.tolerance = CHECK_TOLERANCE if self._half is None else HALF_TOLERANCE
        # A parameter, so that graphs read its value and need no compiling when it changes.
        self._held: Any = None
        if name == "float16":
            self._held = Parameter(
                Tensor(self.scale, ms.float32), name="loss_scale", requires_grad=False
            )

    def objective(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """What is differentiated. Works in a graph.

        Args:
            forward: gives (total, ...).

        Returns:
            A function that gives (scaled total, (total, ...)), computed in the format.
        """
        inner: Any = forward
        if self._half is not None:
            inner = amp.auto_mixed_precision(forward, "auto", self._half)
        held = self._held

        def plain(*leaves: Tensor) -> Any:
            found = inner(*leaves)
            return found[0], found

        def scaled(*leaves: Tensor) -> Any:
            found = inner(*leaves)
            return found[0].astype(ms.float32) * held, found

        return plain if held is None else scaled

    def overflowed(self) -> None:
        super().overflowed()
        self._hold()

    def succeeded(self) -> None:
        super().succeeded()
        self._hold()

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self._hold()

    def _hold(self) -> None:
        if self._held is not None:
            ops.assign(self._held, Tensor(self.scale, ms.float32))  # see `optimizers.set_rate`
