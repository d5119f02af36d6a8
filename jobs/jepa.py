"""A joint-embedding predictive architecture on digits: predict the target encoder's view.

The context encoder sees some patches of a picture, a predictor says what the target encoder makes
of the others. The target encoder is the context encoder's moving average, once an *update*, with a
momentum that rises along a cosine; so does the weight decay. Source: I-JEPA, arXiv 2301.08243.
Which patches are seen is drawn for each sample from its place in the update, so neither the split
nor the number of ranks changes the update.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestrator import Job, Loss
from orchestrator.jobs.idx import bundled_digits, read_digits

SIDE, PATCH = 28, 7
PATCHES = (SIDE // PATCH) ** 2
SEEN = 6  # patches that the context encoder sees; the others are predicted


def patches_of(images: Tensor) -> Tensor:
    """Cut (samples, 784) into (samples, 16, 49)."""
    rows = images.view(-1, SIDE // PATCH, PATCH, SIDE // PATCH, PATCH).transpose(2, 3)
    return rows.reshape(-1, PATCHES, PATCH * PATCH)


def _blocks(width: int, layers: int) -> nn.Sequential:
    return nn.Sequential(
        *(
            nn.TransformerEncoderLayer(
                width,
                4,
                4 * width,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(layers)
        ),
        nn.LayerNorm(width),
    )


class Encoder(nn.Module):
    """Encoder of patches, with their places, to one vector each."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.inward, self.places = nn.Linear(PATCH * PATCH, width), nn.Embedding(PATCHES, width)
        self.blocks = _blocks(width, layers)

    def forward(self, patches: Tensor, places: Tensor) -> Tensor:
        """Map (samples, n, 49) and their places (samples, n) to (samples, n, width)."""
        return self.blocks(self.inward(patches) + self.places(places))


class Predictor(nn.Module):
    """Predict a vector for each hidden place from the vectors of the visible ones."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.unseen, self.places = nn.Parameter(torch.zeros(width)), nn.Embedding(PATCHES, width)
        self.blocks, self.outward = _blocks(width, layers), nn.Linear(width, width)

    def forward(self, seen: Tensor, places: Tensor, asked: Tensor) -> Tensor:
        """Map (samples, n, width), places (samples, n), (samples, m) to (samples, m, width)."""
        known, unknown = seen + self.places(places), self.unseen + self.places(asked)
        return self.outward(self.blocks(torch.cat([known, unknown], 1))[:, places.shape[1] :])


class Both(nn.Module):
    """Context encoder and predictor, which are trained, and the target encoder, which follows."""

    def __init__(self, width: int, layers: int, predictor_layers: int) -> None:
        super().__init__()
        self.context, self.predictor = Encoder(width, layers), Predictor(width, predictor_layers)
        self.target = copy.deepcopy(self.context).requires_grad_(requires_grad=False)


class Patches:
    """Data set of pictures in patches, each with a random order of its places."""

    def __init__(self, images: Tensor) -> None:
        self.patches = patches_of(images)

    def __len__(self) -> int:
        return len(self.patches)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.patches[index], torch.randperm(PATCHES)


class Jepa(Job):
    """Learn to represent digits without their labels.

    Args:
        data_dir: folder with MNIST's four IDX files; None for the digits that scikit-learn ships.
        width, layers, predictor_layers: sizes.
        momentum, weight_decay: at the first update and at the end of the schedule.
        horizon: updates that the schedules last.
    """

    augments = True

    def __init__(
        self,
        data_dir: str | None = None,
        width: int = 48,
        layers: int = 2,
        predictor_layers: int = 1,
        momentum: Sequence[float] = (0.98, 1.0),
        weight_decay: Sequence[float] = (0.04, 0.4),
        horizon: int = 60,
    ) -> None:
        self.folder = Path(data_dir).expanduser() if data_dir else bundled_digits()
        self.sizes, self.horizon = (width, layers, predictor_layers), horizon
        self.momentum, self.weight_decay = momentum, weight_decay
        self._optimizer: torch.optim.Optimizer | None = None

    def model(self) -> nn.Module:
        return Both(*self.sizes)

    def _images(self, part: str) -> tuple[Tensor, Tensor]:
        images, labels = read_digits(self.folder, part)
        pixels = torch.from_numpy(images.reshape(len(images), -1).copy()).float() / 255
        return pixels, torch.from_numpy(labels.copy()).long()

    def dataset(self) -> Patches:
        return Patches(self._images("train")[0])

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Loss:
        patches, order = batch
        seen, asked = order[:, :SEEN], order[:, SEEN:]
        context = model.context(_at(patches, seen), seen)
        predicted = model.predictor(context, seen, asked)
        with torch.no_grad():
            every = torch.arange(PATCHES, device=order.device).expand_as(order)
            target = _at(model.target(patches, every), asked)
            target = functional.layer_norm(target, target.shape[-1:])
        total = functional.smooth_l1_loss(predicted, target, reduction="sum") / target.shape[-1]
        return Loss(total, weight=asked.numel())

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        matrices, vectors = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() < 2]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=1.0, weight_decay=self.weight_decay[0])
        return self._optimizer

    def scheduled(self, ends: Sequence[float], update: int) -> float:
        """Return a half cosine's value: `ends[0]` at update 0, `ends[1]` at the horizon."""
        progress = min(1.0, update / self.horizon)
        return ends[1] + (ends[0] - ends[1]) * (1 + math.cos(math.pi * progress)) / 2

    def after_update(self, model: nn.Module, update: int) -> None:
        momentum = self.scheduled(self.momentum, update)
        for follows, leads in zip(
            model.target.parameters(), model.context.parameters(), strict=True
        ):
            follows.lerp_(leads, 1 - momentum)
        if self._optimizer is not None:  # for the next update; checkpoints hold it
            decay = self.scheduled(self.weight_decay, update + 1)
            self._optimizer.param_groups[0]["weight_decay"] = decay

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return how often a held-out digit's nearest neighbour in training is of its class."""
        parameter = next(model.parameters())

        def represented(images: Tensor) -> Tensor:
            patches = patches_of(images.to(parameter))
            every = torch.arange(PATCHES, device=patches.device).expand(len(patches), -1)
            return functional.normalize(model.target(patches, every).mean(1), dim=1)

        (known, labels), (asked, wanted) = self._images("train"), self._images("test")
        known, labels = known[:2000], labels[:2000]
        found, base = represented(asked), represented(known)
        nearest = labels[(found @ base.T).argmax(1).cpu()]
        return {
            "neighbour_accuracy": (nearest == wanted).float().mean().item(),
            "spread": found.std(0).norm().item(),  # 0 when all digits collapse into one vector
        }


def _at(patches: Tensor, places: Tensor) -> Tensor:
    """Gather (samples, n, *) at places (samples, m) to (samples, m, *)."""
    return patches.gather(1, places.unsqueeze(2).expand(-1, -1, patches.shape[2]))
