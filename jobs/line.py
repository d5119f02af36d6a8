"""A straight line, y = 2x + 3 with noise, fitted by MindSpore: the smallest complete job."""

from __future__ import annotations

import numpy as np
from mindspore import nn, ops

from orchestrator import Job, Loss


class Line(Job):
    """Recover slope and intercept.

    Args:
        samples: how many points are drawn.
        noise: standard deviation around the line.
        seed: of the points, which are the same on every rank.
    """

    framework = "mindspore"

    def __init__(self, samples: int = 1024, noise: float = 0.1, seed: int = 0) -> None:
        self.samples, self.noise, self.seed = samples, noise, seed

    def model(self):
        return nn.Dense(1, 1)

    def dataset(self):
        draw = np.random.default_rng(self.seed)
        x = draw.uniform(-1, 1, (self.samples, 1)).astype(np.float32)
        y = 2 * x + 3 + self.noise * draw.standard_normal(x.shape).astype(np.float32)
        return list(zip(x, y, strict=True))

    def loss(self, model, batch):
        x, y = batch
        return Loss(ops.square(model(x) - y).sum(), weight=len(y))

    def evaluate(self, model):
        return {
            "slope": float(model.weight.asnumpy()[0, 0]),
            "intercept": float(model.bias.asnumpy()[0]),
        }
