"""Handwritten digits with the MLP 784-512-256-128-10: scikit-learn's, or your own MNIST folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from orchestrator import Job, Loss
from orchestrator.jobs.idx import bundled_digits, read_digits


class Digits(Job):
    """Classify digits.

    Args:
        data_dir: folder with MNIST's four IDX files; None for the digits that scikit-learn ships.
        layers: sizes of the MLP's layers, from pixels to classes.
        dropout: share of each hidden layer's outputs that is dropped in training.
    """

    metric_names = ("accuracy",)

    def __init__(
        self,
        data_dir: str | None = None,
        layers: Sequence[int] = (784, 512, 256, 128, 10),
        dropout: float = 0.0,
    ) -> None:
        self.folder = Path(data_dir).expanduser() if data_dir else bundled_digits()
        self.layers, self.dropout = list(layers), dropout

    def model(self) -> nn.Module:
        parts: list[nn.Module] = []
        for inputs, outputs in zip(self.layers, self.layers[1:], strict=False):
            # One module whatever the dropout, so that weights keep their names.
            parts += [nn.Linear(inputs, outputs), self._activation()]
        return nn.Sequential(*parts[:-1])

    def _activation(self) -> nn.Module:
        return nn.Sequential(nn.ReLU(), nn.Dropout(self.dropout)) if self.dropout else nn.ReLU()

    def dataset(self, part: str = "train") -> TensorDataset:
        images, labels = read_digits(self.folder, part)
        pixels = torch.from_numpy(images.reshape(len(images), -1).copy())
        return TensorDataset(pixels.float() / 255, torch.from_numpy(labels.copy()).long())

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Loss:
        pixels, labels = batch
        scores = model(pixels)
        right = (scores.argmax(1) == labels).sum()
        total = functional.cross_entropy(scores, labels, reduction="sum")
        return Loss(total, weight=len(labels), metrics={"accuracy": right})

    def validation(self) -> TensorDataset:
        return self.dataset("test")
