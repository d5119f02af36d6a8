"""Jobs that compute wrongly on one rank, or cannot be computed twice."""

import json
import os

import torch

from orchestrator import current_run
from tests.tiny_job import Tiny


class Wrong(Tiny):
    """One bit of a gradient is another on one rank. Args: rank; lasting: in all its leaves from
    update `since` on, computed for whomever; else once, in the leaf that it computes first.
    """

    def __init__(self, rank=None, lasting=True, since=0, **more):
        super().__init__(**more)
        self.rank, self.lasting, self.since = rank, lasting, since
        self.errors = Errors()

    def state_dict(self):  # of the samples' numbers nothing
        return {}

    def load_state_dict(self, state):
        pass

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        here = self.rank == int(os.environ["SLURM_PROCID"])
        if here and current_run.update >= self.since and self.errors.happens(self.lasting):
            handle = model[0].weight.register_hook(lambda gradient: flipped(gradient, handle))
        return loss


class Errors:
    """Of a machine, so no state of the job; an index makes it look like a data set."""

    def __init__(self):
        self.updates = set()

    def __getitem__(self, index):
        raise IndexError

    def happens(self, lasting):
        """Return whether this computation is wrong: each, or the first one in each update."""
        first = current_run.update not in self.updates
        self.updates.add(current_run.update)
        return lasting or first


def flipped(gradient, handle):
    handle.remove()
    bits = gradient.clone().view(torch.int32)
    bits.view(-1)[0] ^= 1 << 20
    return bits.view(torch.float32)


class Stateful(Tiny):
    """Has a batch norm, numbers in a module, a counter, random numbers after each update, and a
    parameter that some micro-steps use.

    Each rank writes down what these are after each update.
    """

    batch_dependent = True

    def __init__(self, **more):
        super().__init__(**more)
        self.latest = None

    def model(self):
        return torch.nn.Sequential(
            torch.nn.Linear(8, self.width),
            torch.nn.BatchNorm1d(self.width),
            Branch(self.width),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(self.width, 1),
        )

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        self.latest = loss.total.detach()
        return loss

    def after_update(self, model, update):
        line = [
            model[1].running_mean.tolist(),
            int(model[1].num_batches_tracked),
            model[2].calls,
            self.steps,
            float(self.latest),
            torch.rand(1).item(),
        ]
        with (current_run.folder / f"state-{current_run.rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def evaluate(self, model):
        return {}


class Branch(torch.nn.Module):
    """Scales some micro-batches, and counts all."""

    def __init__(self, width):
        super().__init__()
        self.scale, self.calls = torch.nn.Parameter(torch.ones(width)), 0

    def forward(self, x):
        self.calls += 1
        return x * self.scale if x[0, 0] > 0 else x


class Spectral(Tiny):
    """Each forward changes buffers that the next one uses."""

    def model(self):
        made = super().model()
        torch.nn.utils.parametrizations.spectral_norm(made[0])
        return made


class Keeping(Tiny):
    """Changes a list in place, which cannot be restored."""

    def __init__(self, **more):
        super().__init__(**more)
        self.seen = [0]

    def loss(self, model, batch):
        self.seen[0] += len(batch[0])
        return super().loss(model, batch)
