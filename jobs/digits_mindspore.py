"""Handwritten digits with the MLP 784-512-512-10 in MindSpore, read by its own data pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from mindspore import nn, ops
from mindspore.dataset import MnistDataset

from orchestrator import Job, Loss
from orchestrator.jobs.idx import bundled_digits, read_digits


class DigitsMindSpore(Job):
    """Classify digits.

    Args:
        data_dir: folder with MNIST's four IDX files; None for the digits that scikit-learn ships.
        layers: sizes of the MLP's layers, from pixels to classes.
    """

    framework = "mindspore"
    metric_names = ("accuracy",)

    def __init__(
        self,
        data_dir: str | None = None,
        layers: Sequence[int] = (784, 512, 512, 10),
    ) -> None:
        self.folder = Path(data_dir).expanduser() if data_dir else bundled_digits()
        self.layers = list(layers)

    def model(self):
        parts = []
        for inputs, outputs in zip(self.layers, self.layers[1:], strict=False):
            parts += [nn.Dense(inputs, outputs), nn.ReLU()]
        return nn.SequentialCell(parts[:-1])

    def dataset(self, part: str = "train"):
        images, _ = read_digits(self.folder, part)  # checked here: MindSpore's messages are long
        pipeline = MnistDataset(str(self.folder), usage=part, shuffle=False)
        (whole,) = pipeline.batch(len(images)).create_tuple_iterator(
            num_epochs=1, output_numpy=True
        )
        pixels = whole[0].reshape(len(images), -1).astype(np.float32) / 255
        return list(zip(pixels, whole[1].astype(np.int32), strict=True))

    def loss(self, model, batch):
        pixels, labels = batch
        scores = model(pixels)
        right = (scores.argmax(1) == labels).sum()
        total = ops.cross_entropy(scores, labels, reduction="sum")
        return Loss(total, weight=len(labels), metrics={"accuracy": right})

    def validation(self):
        return self.dataset("test")
