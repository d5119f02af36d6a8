"""The torch engine.

| module | holds |
|---|---|
| `accumulator` | the path of a gradient from `backward` to `step`; begin reading here |
| `window_state` | which call is legal when, in a window and in `run.windows` |
| `buffers` | flat gradient buffers, hooks that fill them, unused parameters |
| `reducer`, `sharding`, `reproducible` | the three ways to sum buffers over ranks |
| `fully_sharded` | models of FSDP2, whose shards are summed over copies of the model |
| `checks` | what a rank refuses: arguments, models, losses, samples |
| `consistency_checks` | what has to be the same on all ranks: versions, models, weights |
| `group`, `collectives` | groups of ranks; collectives inside a model, with their gradients |
| `transports`, `rendezvous` | process groups (gloo, NCCL, HCCL), and how ranks meet |
| `engine` | a job's model, data and optimizer on an accumulator; other groups |
| `model`, `loader`, `state`, `grad_cache` | parts of it: models, batches, files, coupled losses |
"""

from __future__ import annotations

from orchestrator.engine.api import AccumulationOptions
from orchestrator.engine.torch.accumulator import Accumulator
from orchestrator.engine.torch.collectives import (
    AllGather,
    AllReduceMean,
    AllReduceSum,
    all_gather,
    all_reduce_mean,
    all_reduce_sum,
)
from orchestrator.engine.torch.consistency_checks import versions
from orchestrator.engine.torch.engine import TorchEngine
from orchestrator.engine.torch.group import BaseGroup
from orchestrator.engine.torch.model import with_norms
from orchestrator.engine.torch.rendezvous import form_group
from orchestrator.engine.torch.transports import TorchGroup
from orchestrator.job import Loss

__all__ = [
    "AccumulationOptions",
    "Accumulator",
    "AllGather",
    "AllReduceMean",
    "AllReduceSum",
    "BaseGroup",
    "Loss",
    "TorchEngine",
    "TorchGroup",
    "all_gather",
    "all_reduce_mean",
    "all_reduce_sum",
    "form_group",
    "versions",
    "with_norms",
]
