"""The torch engine: groups, differentiable collectives, the accumulator, and the engine over them.

from orchestrator.engine.torch import Accumulator, TorchGroup, all_gather
"""

from __future__ import annotations

from typing import Any

import torch

from orchestrator.engine.torch.accumulator import Accumulator
from orchestrator.engine.torch.base_group import BaseGroup
from orchestrator.engine.torch.collectives import (
    AllGather,
    AllReduceMean,
    AllReduceSum,
    all_gather,
    all_reduce_mean,
    all_reduce_sum,
)
from orchestrator.engine.torch.engine import TorchEngine, build_engine
from orchestrator.engine.torch.group import TorchGroup
from orchestrator.engine.torch.in_process import InProcessGroup, run_in_threads
from orchestrator.engine.torch.rendezvous import form_group
from orchestrator.job import Loss


def versions() -> dict[str, str]:
    """Versions of what computes and carries: torch, and CUDA, cuDNN and NCCL where they are."""
    found: dict[str, str] = {"torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["cudnn"] = str(torch.backends.cudnn.version())
        nccl: Any = getattr(torch.cuda, "nccl")  # noqa: B009  # not declared in torch.cuda
        found["nccl"] = ".".join(str(part) for part in nccl.version())
    return found


__all__ = [
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
]
