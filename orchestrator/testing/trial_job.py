"""The job of `ClusterSuite`: small, and slow enough for a test to intervene."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch.utils.data import TensorDataset

from orchestrator.job import Job, Loss


class LineJob(Job):
    """A line through a few points.

    Args:
        pause_s: of every micro-step.
        leaving: a rank that ends its process in its tenth micro-step, as if it were done.
    """

    def __init__(self, pause_s: float = 0.0, leaving: int | None = None) -> None:
        self._pause_s, self._leaving, self._steps = pause_s, leaving, 0

    def model(self) -> Any:
        return torch.nn.Linear(1, 1)

    def dataset(self) -> Any:
        x = torch.linspace(-1, 1, 64).unsqueeze(1)
        return TensorDataset(x, 2 * x + 3)

    def loss(self, model: Any, batch: Any) -> Loss:
        x, y = batch
        time.sleep(self._pause_s)
        self._steps += 1
        if self._steps == 10 and os.environ["SLURM_PROCID"] == str(self._leaving):
            os._exit(0)
        return Loss(((model(x) - y) ** 2).sum(), weight=len(x))
