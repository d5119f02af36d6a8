"""What decides the bits of a computation: versions, threads, and the kind of processor."""

from __future__ import annotations

from typing import Any

import torch


def versions() -> dict[str, str]:
    """Versions of what computes and carries, and what it computes on. Equal facts, equal bits."""
    found: dict[str, str] = {
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["cudnn"] = str(torch.backends.cudnn.version())
        nccl: Any = getattr(torch.cuda, "nccl")  # noqa: B009  # not declared in torch.cuda
        found["nccl"] = ".".join(str(part) for part in nccl.version())
    return found
