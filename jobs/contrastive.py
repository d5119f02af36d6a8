"""Match right and left halves of digits: a contrastive loss with global negatives.

Every sample of the update is a negative for every other one, on whatever rank either is computed;
the engine gathers the embeddings once an update (`Coupled` in orchestrator/job.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from orchestrator import Job, Loss
from orchestrator.jobs.idx import bundled_digits, read_digits

SIDE = 28
CHOICES = 50  # right halves to choose from in the evaluation


class TwoTowers(nn.Module):
    """An encoder for left halves, one for right halves, and the temperature of their scores."""

    def __init__(self, hidden: int, width: int, dropout: float) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(
                nn.Linear(SIDE * SIDE // 2, hidden),
                nn.ReLU(),
                nn.Dropout(dropout),
                nn.Linear(hidden, width),
            )
            for _ in range(2)
        )
        self.log_temperature = nn.Parameter(torch.tensor(-2.0))

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Map (samples, 784) to (samples, width) of unit length, for left and right halves."""
        picture = pixels.view(-1, SIDE, SIDE)
        left, right = picture[:, :, : SIDE // 2], picture[:, :, SIDE // 2 :]
        return (
            functional.normalize(self.left(left.flatten(1)), dim=1),
            functional.normalize(self.right(right.flatten(1)), dim=1),
        )


class Contrastive(Job):
    """Match the halves of digits.

    Args:
        data_dir: folder with MNIST's four IDX files; None for the digits that scikit-learn ships.
        hidden, width: sizes of an encoder's hidden layer, and of the embeddings.
        dropout: in the encoders.
    """

    metric_names = ("matched",)

    def __init__(
        self, data_dir: str | None = None, hidden: int = 128, width: int = 32, dropout: float = 0.1
    ) -> None:
        self.folder = Path(data_dir).expanduser() if data_dir else bundled_digits()
        self.sizes = (hidden, width, dropout)

    def model(self) -> nn.Module:
        return TwoTowers(*self.sizes)

    def dataset(self, part: str = "train") -> TensorDataset:
        images, _ = read_digits(self.folder, part)
        return TensorDataset(torch.from_numpy(images.reshape(len(images), -1).copy()).float() / 255)

    def embed(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return model(batch[0])

    def loss_of_embeddings(self, model: nn.Module, embeddings: tuple[Tensor, Tensor]) -> Loss:
        left, right = embeddings
        scores = left @ right.T / model.log_temperature.exp()
        own = torch.arange(len(scores), device=scores.device)
        rows = functional.cross_entropy(scores, own, reduction="sum")
        columns = functional.cross_entropy(scores.T, own, reduction="sum")
        matched = (scores.argmax(1) == own).sum()
        return Loss((rows + columns) / 2, weight=len(scores), metrics={"matched": matched})

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        (pixels,) = self.dataset("test").tensors
        left, right = model(pixels.to(next(model.parameters())))
        matched = 0
        for first in range(0, len(left), CHOICES):
            scores = left[first : first + CHOICES] @ right[first : first + CHOICES].T
            matched += int((scores.argmax(1).cpu() == torch.arange(len(scores))).sum())
        return {"matched": matched / len(left)}
