"""A variational autoencoder of small pictures, whose KL term is annealed by the update's number.

Each sample's noise is drawn with the sample (`augments`), so it depends on the update and on the
sample's place in it, not on the micro-step or rank that computes it: any split gives one update.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from orchestrator import Job, Loss, current_run

SIDE = 12
PIXELS = SIDE * SIDE


def draw_blobs(count: int, seed: int) -> Tensor:
    """Return pictures of a blob at a random place, shape (count, PIXELS), values from 0 to 1."""
    generator = torch.Generator().manual_seed(seed)
    row, column, radius = torch.rand(3, count, 1, 1, generator=generator)
    axis = torch.arange(SIDE) / (SIDE - 1)
    squares = (axis.view(1, -1, 1) - row) ** 2 + (axis.view(1, 1, -1) - column) ** 2
    return torch.exp(-squares / (0.05 + 0.1 * radius) ** 2).flatten(1)


class Blobs(Dataset[tuple[Tensor, Tensor]]):
    """Pictures, each with noise of shape (latent,), which is drawn anew in every epoch."""

    def __init__(self, count: int, latent: int, seed: int) -> None:
        self.pictures, self.latent = draw_blobs(count, seed), latent

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.pictures[index], torch.randn(self.latent)


class Autoencoder(nn.Module):
    """Encoder to the mean and log-variance of a normal distribution, and decoder to logits."""

    def __init__(self, hidden: int, latent: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(PIXELS, hidden), nn.Tanh(), nn.Linear(hidden, 2 * latent)
        )
        self.decoder = nn.Sequential(
            nn.Linear(latent, hidden), nn.Tanh(), nn.Linear(hidden, PIXELS)
        )

    def forward(self, pictures: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map (samples, PIXELS) and (samples, latent) to logits, means and log-variances."""
        mean, log_variance = self.encoder(pictures).chunk(2, dim=1)
        code = mean + noise * (log_variance / 2).exp() if self.training else mean
        return self.decoder(code), mean, log_variance


class VariationalAutoencoder(Job):
    """Encode pictures of blobs.

    Args:
        samples, held_out: numbers of pictures.
        hidden, latent: sizes of the hidden layers, and of the code.
        annealing_updates: the weight of the KL term rises from 0 to 1 over so many updates.
    """

    metric_names = ("reconstruction", "kl")
    augments = True

    def __init__(
        self,
        samples: int = 2048,
        held_out: int = 256,
        hidden: int = 64,
        latent: int = 4,
        annealing_updates: int = 100,
    ) -> None:
        self.samples, self.held_out = samples, held_out
        self.hidden, self.latent = hidden, latent
        self.annealing_updates = annealing_updates

    def model(self) -> nn.Module:
        return Autoencoder(self.hidden, self.latent)

    def dataset(self) -> Blobs:
        return Blobs(self.samples, self.latent, seed=0)

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Loss:
        pictures, noise = batch
        logits, mean, log_variance = model(pictures, noise)
        reconstruction = functional.binary_cross_entropy_with_logits(
            logits, pictures, reduction="sum"
        )
        # To the standard normal distribution (Kingma and Welling, arXiv:1312.6114, appendix B).
        kl = (mean**2 + log_variance.exp() - 1 - log_variance).sum() / 2
        kl_weight = min(1.0, current_run.update / max(1, self.annealing_updates))
        return Loss(
            reconstruction + kl_weight * kl,
            weight=len(pictures),
            metrics={"reconstruction": reconstruction.detach(), "kl": kl.detach()},
        )

    def validation(self) -> Blobs:
        return Blobs(self.held_out, self.latent, seed=1)
