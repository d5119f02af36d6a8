"""A small job for tests: quick, exact, and able to fail in many ways at a chosen moment."""

import os
import signal
import time

import torch
from torch.utils.data import TensorDataset

from orchestrator import Job, Loss


class Tiny(Job):
    """A net of two layers on made-up data.

    Args:
        pause_s: sleep in every micro-step, so that a test can step in.
        fault: what happens to rank `fault_rank` when it has done `fault_after` micro-steps:
            "raise", "kill", "exit", "leave", "nan", "memory", "silence", "hang", "drift".
    """

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
    ):
        self.samples, self.width, self.dropout, self.pause_s = samples, width, dropout, pause_s
        self.fault, self.fault_rank, self.fault_after = fault, fault_rank, fault_after
        self.steps = 0

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
        self._perhaps_fail()
        if self.pause_s:
            time.sleep(self.pause_s)
        error = model(x) - y
        total = (error**2).sum()
        if self._now("nan"):
            total = total * float("nan")
        self.steps += 1
        return Loss(total, weight=len(x), metrics={"error": error.detach().abs().sum()})

    def evaluate(self, model):
        x, y = self.dataset().tensors
        parameter = next(model.parameters())
        return {"loss": ((model(x.to(parameter)) - y.to(parameter)) ** 2).mean().item()}

    def after_update(self, model, update):
        if self._now("drift"):
            model[0].weight[0, 0] += 1e-6

    def _now(self, fault):
        mine = int(os.environ["SLURM_PROCID"]) == self.fault_rank
        return self.fault == fault and mine and self.steps == self.fault_after

    def _perhaps_fail(self):
        if self._now("raise"):
            raise ValueError("the tiny job was told to fail [here]")
        if self._now("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._now("exit"):
            os._exit(7)
        if self._now("leave"):
            os._exit(0)
        if self._now("memory"):
            raise MemoryError
        if self._now("hang"):
            time.sleep(3600)


class Threads(Tiny):
    """Computes with other threads on rank 1, as a badly configured node would."""

    def model(self):
        torch.set_num_threads(1 + (os.environ["SLURM_PROCID"] == "1"))
        return super().model()


class Uneven(Tiny):
    """Has more data on one rank, as people do who split it themselves."""

    def dataset(self):
        x, y = super().dataset().tensors
        kept = len(x) - 40 * (os.environ["SLURM_PROCID"] == "1")
        return TensorDataset(x[:kept], y[:kept])


class Other(Tiny):
    """Has one other number in its data on rank 1, as after a copy that went wrong."""

    def dataset(self):
        x, y = super().dataset().tensors
        y[-1] += 1e-6 * (os.environ["SLURM_PROCID"] == "1")
        return TensorDataset(x, y)


class OwnRate(Tiny):
    """Has learning rates of its own."""

    def learning_rate(self, update):
        return 0.01 / (1 + update)
