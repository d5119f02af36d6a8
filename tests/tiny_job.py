"""A small job for tests: quick, exact, and able to fail in many ways at a chosen moment."""

import os
import random
import time

import torch
from torch.utils.data import TensorDataset

from orchestrator import Job, Loss
from tests.acting_job import Acting
from tests.callback_job import Journaled
from tests.faulty_job import Faulty


class Tiny(Faulty, Job):
    """A network of two layers on generated data. Arguments: see `Faulty`, too."""

    metric_names = ("error",)

    def __init__(
        self,
        samples=240,
        width=16,
        dropout=0.0,
        pause_s=0.0,
        fault=None,
        fault_rank=1,
        fault_after=5,
        hold=None,
    ):
        super().__init__(pause_s, fault, fault_rank, fault_after, hold)
        self.samples, self.width, self.dropout = samples, width, dropout

    def model(self):
        return torch.nn.Sequential(
            torch.nn.Linear(8, self.width),
            torch.nn.Tanh(),
            torch.nn.Dropout(self.dropout),
            torch.nn.Linear(self.width, 1),
        )

    def dataset(self):
        made = torch.Generator().manual_seed(1)
        x = torch.randn(self.samples, 8, generator=made)
        return TensorDataset(x, x.sum(1, keepdim=True).sin())

    def loss(self, model, batch):
        x, y = batch
        self.pause_or_fail()
        error = model(x) - y
        self.steps += 1
        return Loss((error**2).sum(), weight=len(x), metrics={"error": error.detach().abs().sum()})

    def evaluate(self, model):
        x, y = self.dataset().tensors
        parameter = next(model.parameters())
        return {"loss": ((model(x.to(parameter)) - y.to(parameter)) ** 2).mean().item()}

    def after_update(self, model, update):
        super().after_update(model, update)
        if self.now("drift"):
            model[0].weight[0, 0] += 1e-6


class Lively(Acting, Tiny):
    """Ends or hangs at a chosen place in chosen ranks; see `Acting`."""


class HeldOut(Tiny):
    """All ranks evaluate two data sets of it; a hold holds that, too, before the next update."""

    def validation(self):
        made = torch.Generator().manual_seed(2)
        x = torch.randn(43, 8, generator=made)
        return {"seen": self.dataset(), "unseen": TensorDataset(x, x.sum(1, keepdim=True).sin())}

    def evaluate(self, model):
        return {"parameters": len(list(model.parameters()))}


class JournaledHeldOut(Journaled, HeldOut):
    """The same with callbacks that are written down."""


class Sized(Tiny):
    """Its samples have nominal lengths. Args: slow_rank: takes several times as long for each."""

    def __init__(self, slow_rank=None, **more):
        super().__init__(**more)
        self.slow_rank = slow_rank

    def lengths(self):
        return [1 + 7 * index % 13 for index in range(self.samples)]

    def loss(self, model, batch):
        began = time.perf_counter()
        loss = super().loss(model, batch)
        if self.slow_rank is not None:
            slow = self.slow_rank == int(os.environ["SLURM_PROCID"])
            time.sleep((0.004 if slow else 0.001) * len(batch[0]))
            if slow:  # also where a starved processor, not the sleep, takes the time
                time.sleep(4 * (time.perf_counter() - began))
        return loss


class Measured(TensorDataset):
    """Its samples have nominal lengths, the first ones by far the longest."""

    @property
    def lengths(self):
        return [30 if index < 6 else 1 for index in range(len(self))]


class SizedHeldOut(Sized):
    """All ranks evaluate data with lengths."""

    def validation(self):
        return Measured(*self.dataset().tensors)

    def evaluate(self, model):
        return {}


class OwnRate(Tiny):
    """Has learning rates of its own."""

    def learning_rate(self, update):
        return 0.01 / (1 + update)


class Talking(Tiny):
    """Its loss may call collectives."""

    talks_in_window = True


class Unrepeatable(Tiny):
    """Draws random numbers from a generator that the engine does not know."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        factor = 1 + 1e-3 * random.SystemRandom().random()
        return Loss(loss.total * factor, weight=loss.weight, metrics=loss.metrics)


class Hidden(Tiny):
    """Has a framework that a static check cannot read."""

    framework = "TORCH".lower()
