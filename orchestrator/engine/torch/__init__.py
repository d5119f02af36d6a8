"""The torch engine: groups, differentiable collectives, the accumulator, and the engine over them.

from orchestrator.engine.torch import Accumulator, TorchGroup, all_gather
"""

from __future__ import annotations

from orchestrator.engine.api import AccumulationOptions
from orchestrator.engine.torch.accumulator import Accumulator
from orchestrator.engine.torch.engine import TorchEngine, build_engine
from orchestrator.engine.torch.group import (
    AllGather,
    AllReduceMean,
    AllReduceSum,
    BaseGroup,
    InProcessGroup,
    all_gather,
    all_reduce_mean,
    all_reduce_sum,
    run_in_threads,
)
from orchestrator.engine.torch.model import with_norms
from orchestrator.engine.torch.rendezvous import form_group
from orchestrator.engine.torch.start_checks import versions
from orchestrator.engine.torch.transports import TorchGroup
from orchestrator.job import Loss

__all__ = [
    "AccumulationOptions",
    "Accumulator",
    "AllGather",
    "AllReduceMean",
    "AllReduceSum",
    "BaseGroup",
    "InProcessGroup",
    "Loss",
    "TorchEngine",
    "TorchGroup",
    "all_gather",
    "all_reduce_mean",
    "all_reduce_sum",
    "build_engine",
    "form_group",
    "run_in_threads",
    "versions",
    "with_norms",
]
