"""What a rank's memory is for: weights, gradients, the optimizer's state; and its peak."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Module

from orchestrator.engine.torch.accumulator import Accumulator
from orchestrator.engine.torch.comm.tensors import bytes_of


def memory_bytes(model: Module, accumulator: Accumulator) -> dict[str, int]:
    """Bytes of this rank by what they are for. Tensors that share memory count once."""
    state = accumulator.optimizer.state.values()
    return {
        "parameters": _bytes((*model.parameters(), *model.buffers())),
        "gradients": accumulator.gradient_bytes(),
        "optimizer": _bytes(v for held in state for v in held.values() if isinstance(v, Tensor)),
    }


def peak_memory_bytes(device: torch.device) -> int:
    """Largest memory so far: the GPU's where it computes there, or else the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere else


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum({(t.device, t.data_ptr(), t.numel()): bytes_of(t) for t in tensors}.values())
