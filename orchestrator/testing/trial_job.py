"""The job of `ClusterSuite`: small, and slow enough to step in."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils.data import TensorDataset

from orchestrator.job import Job, Loss


class Trial(Job):
    """A line through a few points.

    Args:
        pause_s: of every micro-step.
    """

    def __init__(self, pause_s: float = 0.0) -> None:
        self._pause_s = pause_s

    def model(self) -> Any:
        return torch.nn.Linear(1, 1)

    def dataset(self) -> Any:
        x = torch.linspace(-1, 1, 64).unsqueeze(1)
        return TensorDataset(x, 2 * x + 3)

    def loss(self, model: Any, batch: Any) -> Loss:
        x, y = batch
        time.sleep(self._pause_s)
        return Loss(((model(x) - y) ** 2).sum(), weight=len(x))
