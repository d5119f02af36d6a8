"""Which reduction the settings ask for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from orchestrator.engine.torch.base_group import BaseGroup
from orchestrator.engine.torch.buffer import GradientBuffers
from orchestrator.engine.torch.reduction import AtBoundary, EveryStep, Reduction
from orchestrator.engine.torch.reproducible import Reproducible
from orchestrator.errors import ConfigError


def reduction_for(
    parameters: list[tuple[str, Tensor]],
    group: BaseGroup,
    *,
    reduction: str,
    sync: str,
    metric_count: int,
    bucket_bytes: int | None,
    overlap: bool,
    order: Sequence[int] | None = None,
) -> Reduction:
    """The reduction for `accumulation.reduction` and `accumulation.sync`, with its buffers.

    Raises:
        ConfigError: there is none for these two, or a bucket is too small for a number.
    """
    if (reduction, sync) == ("reproducible", "boundary"):
        buffers = GradientBuffers(parameters, metric_count=None, pad_to=group.size)
        return Reproducible(buffers, group)
    kinds = {("fast", "boundary"): AtBoundary, ("fast", "every_step"): EveryStep}
    if (reduction, sync) not in kinds:
        raise ConfigError(
            f"there is no accumulation.reduction={reduction} with accumulation.sync={sync}; there "
            "are fast with boundary, fast with every_step, and reproducible with boundary"
        )
    buffers = GradientBuffers(parameters, metric_count=metric_count, order=order)
    return kinds[reduction, sync](buffers, group, bucket_bytes=bucket_bytes, overlap=overlap)
