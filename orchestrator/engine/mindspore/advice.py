"""What a user should know of a model before training it in pieces: sentences with their
remedies.
"""

from __future__ import annotations

from typing import Any

from mindspore import nn

_SHOWN = 5
BATCH_NORMS: tuple[Any, ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
RANDOM: tuple[Any, ...] = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def layers(model: nn.Cell, kinds: tuple[Any, ...]) -> list[str]:
    """Names of the model's cells of these kinds."""
    return [name for name, cell in model.cells_and_names() if isinstance(cell, kinds)]


def advice(model: nn.Cell) -> list[str]:
    """Sentences about layers of `model` that do not do what one big batch would."""
    found: list[str] = []
    norms = layers(model, BATCH_NORMS)
    if norms:
        found.append(
            f"batch norm in {_listed(norms)} sees one micro-batch at a time, so the update is not "
            f"that of one big batch, and running statistics differ between ranks. Use GroupNorm or "
            f"LayerNorm instead, freeze the statistics (use_batch_statistics=False), or take one "
            f"micro-step of the whole batch on one rank"
        )
    dropouts = layers(model, RANDOM)
    if dropouts:
        found.append(
            f"dropout in {_listed(dropouts)} draws from a state inside MindSpore's operator, which "
            f"cannot be set: a resumed run draws other numbers, so it will not have the bits of an "
            f"undisturbed one. Regularise by weight decay, or draw masks in the data set"
        )
    return found


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(name or "the model itself" for name in names[:_SHOWN]) + more
