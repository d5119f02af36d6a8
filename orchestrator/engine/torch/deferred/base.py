"""Windows whose micro-batches need each other: they are kept, and computed at the boundary.

There are two: losses of all embeddings (`grad_cache.py`), and batch norm over the whole window
(`exact_batch_norm.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch.nn import Module

from orchestrator.engine.api import EngineSettings, MicroBatch, Window
from orchestrator.engine.torch import loader
from orchestrator.engine.torch.accumulator import Accumulator
from orchestrator.engine.torch.batch_norm.exact import ExactBatchNorm
from orchestrator.engine.torch.comm.base_group import BaseGroup
from orchestrator.engine.torch.deferred.exact_batch_norm import ExactWindows
from orchestrator.engine.torch.deferred.grad_cache import CoupledWindows
from orchestrator.engine.torch.gradients.chunks import Leaves
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

    def finish(self, window: Window) -> float:
        """Have the accumulator take all gradients. Collective; gives seconds spent in waiting."""
        ...

    def applied(self) -> None:
        """The update was applied."""
        ...


def whole_windows(
    job: Any,
    model: Module,
    accumulator: Accumulator,
    group: BaseGroup,
    settings: EngineSettings,
    *,
    prepare: Callable[[Any], Any],
    leaves: Leaves,
) -> WholeWindows | None:
    """What the job's loss, or its norms, ask for; None for plain micro-steps. Not collective.

    Raises:
        ConfigError: `engine.norm=exact` with something that it cannot be had with.
        JobError: see `ExactWindows`.
    """
    coupled = is_coupled(job)
    exact = any(isinstance(layer, ExactBatchNorm) for layer in model.modules())

    def any_batch() -> Any:
        return loader.collate_of(job)([job.dataset()[0]])

    if exact:
        _refuse(job, settings, coupled=coupled)
        return ExactWindows(
            job,
            model,
            accumulator,
            group,
            seed=settings.seed,
            prepare=prepare,
            leaf_of=leaves.leaf_of,
            any_batch=any_batch,
        )
    if coupled:
        return CoupledWindows(
            job,
            model,
            accumulator,
            group,
            metric_names=settings.metric_names,
            seed=settings.seed,
            prepare=prepare,
            leaf_of=leaves.leaf_of,
            any_batch=any_batch,
        )
    return None


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
