"""Jobs whose updates go wrong in a known way."""

import json
import os

import torch

from orchestrator import current_run
from tests.tiny_job import Tiny


class Poisoned(Tiny):
    """Some samples have targets far off. Args: poisoned: their numbers; value: of their targets."""

    def __init__(self, poisoned=(), value=30.0, **more):
        super().__init__(**more)
        self.poisoned, self.value = list(poisoned), float(value)

    def dataset(self):
        data = super().dataset()
        data.tensors[1][self.poisoned] = self.value
        return data


class Flipped(Tiny):
    """One bit of a gradient is another in one leaf. Args: flip: its update, a sample in the leaf,
    the parameter and the bit; rank: where alone this happens; None: everywhere.
    """

    def __init__(self, flip=None, rank=None, **more):
        super().__init__(**more)
        self.flip, self.rank = flip, rank

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        here = self.rank in (None, int(os.environ["SLURM_PROCID"]))
        if self.flip is None or not here or current_run.update != self.flip[0]:
            return loss
        own = self.dataset().tensors[0][self.flip[1]]
        if not (batch[0] == own).all(dim=1).any():
            return loss
        parameter = dict(model.named_parameters())[self.flip[2]]
        bit = self.flip[3]

        def flipped(gradient):
            handle.remove()
            bits = gradient.clone().view(torch.int32)
            bits.view(-1)[0] ^= 1 << bit
            return bits.view(torch.float32)

        handle = parameter.register_hook(flipped)
        return loss


class Traced(Tiny):
    """Each rank writes down the samples that it reads, and in which update it computes them."""

    def dataset(self):
        return Numbered(*super().dataset().tensors)

    def loss(self, model, batch):
        x, y, numbers = batch
        path = current_run.folder / f"read-{current_run.rank}.jsonl"
        with path.open("a") as file:
            file.write(json.dumps([current_run.update, numbers.tolist()]) + "\n")
        return super().loss(model, (x, y))

    def evaluate(self, model):
        return {}


class Numbered(torch.utils.data.TensorDataset):
    """Its samples have their numbers."""

    def __getitem__(self, index):
        return *super().__getitem__(index), index
