"""Which reduction the settings ask for."""

from __future__ import annotations

import torch
from torch import Tensor

from orchestrator.engine.settings import AccumulationOptions
from orchestrator.engine.torch.comm.base_group import BaseGroup
from orchestrator.engine.torch.gradients.at_boundary import AtBoundary, Reduction
from orchestrator.engine.torch.gradients.bucket_sender import BucketSender
from orchestrator.engine.torch.gradients.buffer import GradientBuffers
from orchestrator.engine.torch.gradients.layout import aligned_first
from orchestrator.engine.torch.gradients.reproducible import Reproducible
from orchestrator.engine.torch.sharding.reduction import SegmentSender, ShardedBoundary
from orchestrator.errors import ConfigError, did_you_mean

_REDUCTIONS = ("fast", "reproducible")
WIRES = {"own": None, "bfloat16": torch.bfloat16}


def reduction_for(
    parameters: list[tuple[str, Tensor]], group: BaseGroup, options: AccumulationOptions
) -> Reduction:
    """The reduction that the options ask for, with its buffers.

    One rank has no use for shards: it gets the reduction that it had without.

    Raises:
        ConfigError: there is none for these two, or none that sends gradients as `wire` says, or a
            bucket is too small for a number.
    """
    _check(options)
    order, overlap, bucket_bytes = options.order, options.overlap, options.bucket_bytes
    if options.shard_optimizer and group.size > 1:
        order = aligned_first(parameters, order)
        buffers = GradientBuffers(parameters, metric_count=None, pad_to=group.size, order=order)
        segments = SegmentSender(buffers, group, bucket_bytes)
        return ShardedBoundary(buffers, group, segments, overlap=overlap)
    if options.reduction == "reproducible":
        buffers = GradientBuffers(parameters, metric_count=None, pad_to=group.size)
        return Reproducible(buffers, group)
    buffers = GradientBuffers(parameters, metric_count=len(options.metric_names), order=order)
    sender = BucketSender(buffers, group, bucket_bytes, WIRES[options.wire])
    return AtBoundary(buffers, group, sender, overlap=overlap)


def _check(options: AccumulationOptions) -> None:
    """Refuse what there is no reduction for."""
    reduction, wire = options.reduction, options.wire
    if wire not in WIRES:
        raise ConfigError(f"there is no engine.wire={wire}{did_you_mean(wire, WIRES)}")
    if reduction not in _REDUCTIONS:
        raise ConfigError(
            f"there is no accumulation.reduction={reduction}{did_you_mean(reduction, _REDUCTIONS)}"
        )
    if wire != "own" and reduction != "fast":
        raise ConfigError(
            f"engine.wire={wire} is for accumulation.reduction=fast, not for {reduction}"
        )
    if options.shard_optimizer and reduction != "fast":
        raise ConfigError(
            f"engine.shard_optimizer=true is for accumulation.reduction=fast, not for {reduction}"
        )
    if options.shard_optimizer and wire != "own":
        raise ConfigError(f"engine.shard_optimizer=true is for engine.wire=own, not for {wire}")
