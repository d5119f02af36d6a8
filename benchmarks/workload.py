"""The trained nets and their data: the same numbers on every rank and for all contenders.

Every micro-batch of a net has equally many samples (tokens), the one case in which a mean of means
over micro-steps and ranks, as the peers take it, is the mean over the global batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from jobs.digits import Digits
from jobs.language_model import Transformer
from jobs.python_source import Paragraphs

Batch = tuple[Tensor, Tensor]
"""Inputs, and targets as class numbers of shape (samples,) or (samples * positions,)."""

_WIDTH, _LAYERS, _SAMPLES = 1024, 8, 32
_CONTEXT, _SEQUENCES = 64, 4


@dataclass(frozen=True, kw_only=True)
class Net:
    """A net, and its micro-batch number n for any n.

    Attributes:
        build: gives the model; seeded by the caller.
        batch: gives micro-batch n.
        rate: learning rate with which AdamW learns something in a few dozen updates.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    rate: float = 1e-4


def built(net: Net) -> nn.Module:
    """Return the model with the common initial weights."""
    torch.manual_seed(0)
    return net.build()


def total_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss as a sum over the micro-batch."""
    return functional.cross_entropy(model(batch[0]).flatten(0, -2), batch[1], reduction="sum")


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss as a mean over the micro-batch."""
    return functional.cross_entropy(model(batch[0]).flatten(0, -2), batch[1])


def _mlp(layer_count: int = _LAYERS) -> nn.Module:
    layers = [part for _ in range(layer_count) for part in (nn.Linear(_WIDTH, _WIDTH), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


@lru_cache(maxsize=1)
def _teacher() -> Tensor:
    return torch.randn(_WIDTH, 10, generator=torch.Generator().manual_seed(1))


def _drawn(number: int) -> Batch:
    """Draw noise, and return it with the one of ten directions that it points to most."""
    noise = torch.randn(_SAMPLES, _WIDTH, generator=torch.Generator().manual_seed(1000 + number))
    return noise, (noise @ _teacher()).argmax(1)


@lru_cache(maxsize=1)
def _text() -> Tensor:
    pieces = Paragraphs(4096, 128)
    return torch.cat([pieces[index] for index in range(len(pieces))]).long()


def _read(number: int) -> Batch:
    """Return rows of the standard library's bytes, in order, and each one's next byte."""
    text = _text()
    rows = (len(text) - 1) // _CONTEXT
    first = torch.arange(number * _SEQUENCES, (number + 1) * _SEQUENCES) * 7919 % rows * _CONTEXT
    indices = first[:, None] + torch.arange(_CONTEXT)
    return text[indices], text[indices + 1].flatten()


def _digits(number: int) -> Batch:
    draw = torch.Generator().manual_seed(number)
    return torch.rand(16, 784, generator=draw), torch.randint(0, 10, (16,), generator=draw)


NETS = {
    "mlp": Net(build=_mlp, batch=_drawn, rate=3e-4),
    "large": Net(build=lambda: _mlp(3 * _LAYERS), batch=_drawn, rate=3e-4),
    "transformer": Net(build=lambda: Transformer(128, 4, 4, _CONTEXT, 0.0), batch=_read, rate=3e-3),
    "digits": Net(build=lambda: Digits().model(), batch=_digits),
}
