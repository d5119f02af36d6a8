"""The job of `tests/tiny_job.py` without torch, in the framework of `tests/third_party/framework`:
its ranks start in a quarter of the time.
"""

import numpy as np

from orchestrator import Job, Loss
from tests.faulty_job import Faulty


class Light(Faulty, Job):
    """A network of two layers on generated data; arguments: see `Faulty`, too."""

    framework = "numpy"
    metric_names = ("error",)

    def __init__(
        self, samples=240, width=16, pause_s=0.0, fault=None, fault_rank=1, fault_after=5, hold=None
    ):
        super().__init__(pause_s, fault, fault_rank, fault_after, hold)
        self.samples, self.width = samples, width

    def model(self):
        shapes = {"0.weight": (8, self.width), "0.bias": (self.width,), "1.weight": (self.width,)}
        return {name: 0.3 * np.random.standard_normal(s) for name, s in shapes.items()}

    def dataset(self):
        x = np.random.default_rng(1).standard_normal((self.samples, 8)).astype(np.float32)
        return list(zip(x, np.sin(x.sum(1)), strict=True))

    def loss(self, model, batch):
        x, y = batch
        self.pause_or_fail()
        hidden = np.tanh(x @ model["0.weight"] + model["0.bias"])
        error = hidden @ model["1.weight"] - y
        total = float((error**2).sum())
        back = np.outer(2 * error, model["1.weight"]) * (1 - hidden**2)
        model.gradient["1.weight"] += hidden.T @ (2 * error)
        model.gradient["0.weight"] += x.T @ back
        model.gradient["0.bias"] += back.sum(0)
        self.steps += 1
        return Loss(total, weight=len(x), metrics={"error": np.abs(error).sum()})

    def evaluate(self, model):
        x, y = map(np.stack, zip(*self.dataset(), strict=True))
        hidden = np.tanh(x @ model["0.weight"] + model["0.bias"])
        return {"loss": float(((hidden @ model["1.weight"] - y) ** 2).mean())}
