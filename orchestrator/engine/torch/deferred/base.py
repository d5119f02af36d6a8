"""Windows whose micro-batches need each other: they are kept, and computed at the boundary.

There are two: losses of all embeddings (`grad_cache.py`), and batch norm over the whole window
(`exact_batch_norm.py`).
"""

from __future__ import annotations

from typing import Any, Protocol

from orchestrator.engine.api import MicroBatch, Window
from orchestrator.engine.settings import EngineSettings
from orchestrator.engine.torch.batch_norm.exact import ExactBatchNorm
from orchestrator.engine.torch.deferred.exact_batch_norm import ExactWindows
from orchestrator.engine.torch.deferred.grad_cache import CoupledWindows
from orchestrator.engine.torch.deferred.parts import Parts
from orchestrator.errors import ConfigError
from orchestrator.job import is_coupled


class WholeWindows(Protocol):
    """Takes the place of plain micro-steps."""

    @property
    def collectives(self) -> int:
        """Collectives in each window, besides the gradient's reduction."""
        ...

    def begin(self) -> None:
        """Forget: a window begins."""
        ...

    def micro_step(self, batch: Any, micro_batch: MicroBatch) -> None:
        """Take in one micro-batch. Silent."""
        ...

    def finish(self, window: Window) -> None:
        """Have the accumulator take all gradients. Collective."""
        ...

    def applied(self) -> None:
        """The update was applied."""
        ...


def whole_windows(parts: Parts) -> WholeWindows | None:
    """What the job's loss, or its norms, ask for; None for plain micro-steps. Not collective.

    Raises:
        ConfigError: `engine.norm=exact` with something that it cannot be had with.
        JobError: see `ExactWindows`.
    """
    coupled = is_coupled(parts.job)
    if any(isinstance(layer, ExactBatchNorm) for layer in parts.model.modules()):
        _refuse(parts.job, parts.settings, coupled=coupled)
        return ExactWindows(parts)
    return CoupledWindows(parts) if coupled else None


def _refuse(job: Any, settings: EngineSettings, *, coupled: bool) -> None:
    remedy = "use engine.norm=group or frozen"
    if coupled:
        raise ConfigError(
            f"engine.norm=exact is not available for a job with embed() and loss_of_embeddings(), "
            f"whose micro-batches are computed twice already; {remedy}"
        )
    if settings.precision == "float16":
        raise ConfigError(
            f"engine.norm=exact is not available with train.precision=float16, whose loss scale "
            f"its slopes do not have; {remedy}, or train.precision=bfloat16"
        )
    if getattr(job, "talks_in_window", False):
        raise ConfigError(
            f"engine.norm=exact runs a job's forward several times, and one with talks_in_window "
            f"would talk each time; {remedy}"
        )
