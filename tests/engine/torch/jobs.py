"""A small torch job for tests, and what they train and compare with."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from orchestrator import Job, Loss
from orchestrator.engine.api import EngineSettings
from orchestrator.engine.torch import Accumulator, TorchEngine, TorchGroup

SAMPLES = 29


def engine_of(job, group=None, **settings):
    """Return the engine of a job, by default that of its only rank."""
    given = {"metric_names": getattr(job, "metric_names", ()), **settings}
    return TorchEngine(job, EngineSettings(**given), group or TorchGroup.alone())


def sgd_accumulator(model, group=None, **options):
    """Return an accumulator with a plain optimizer, by default that of an only rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Accumulator(model, optimizer, group or TorchGroup.alone(), **options)


def numbers_of(model):
    """Return a copy of all parameters as one row."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


class Samples:
    """Six samples, each what a function of its index gives."""

    def __init__(self, of):
        self.of = of

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return self.of(index)


class Curve(Job):
    """A net with dropout, the batch's mean of which is known."""

    metric_names = ("error", "size")

    def __init__(self, dropout=0.3):
        self.dropout = dropout

    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(8, 1))

    def dataset(self):
        made = torch.Generator().manual_seed(3)
        x = torch.randn(SAMPLES, 4, generator=made)
        return TensorDataset(x, x.sum(1, keepdim=True).sin())

    def loss(self, model, batch):
        x, y = batch
        error = model(x) - y
        metrics = {"error": error.detach().abs().sum(), "size": float(len(x))}
        return Loss((error**2).sum(), len(x), metrics)

    def evaluate(self, model):
        assert not model.training
        assert not torch.is_grad_enabled()
        x, y = self.dataset().tensors
        return {"loss": ((model(x.to(model[0].weight)) - y) ** 2).mean()}
