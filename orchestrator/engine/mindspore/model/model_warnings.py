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


def batch_norms(model: nn.Cell) -> dict[str, Any]:
    """The model's batch norms by name, "" if it is one itself; without those that are frozen."""
    return {
        name: cell
        for name, cell in model.cells_and_names()
        if isinstance(cell, BATCH_NORMS)
        and getattr(cell, "use_batch_statistics", None) is not False
    }


def advice(model: nn.Cell, *, ranks: int = 2, micro_batches: int | None = None) -> list[str]:
    """Sentences about layers of `model` that do not do what one big batch would.

    Args:
        ranks: how many train it.
        micro_batches: of an update, over all ranks; None for many.
    """
    found: list[str] = []
    norms = list(batch_norms(model))
    if norms and micro_batches != 1:
        apart = ", and running statistics differ between ranks" * (ranks > 1)
        found.append(
            f"batch norm in {listed(norms)} sees one micro-batch at a time, so the update is not "
            f"that of one big batch{apart}. Use "
            f"engine.norm=group or engine.norm=frozen, LayerNorm, or one micro-step of the whole "
            f"batch on one rank"
        )
    dropouts = [name for name, cell in model.cells_and_names() if _draws(cell)]
    if dropouts:
        found.append(
            f"dropout in {listed(dropouts)} draws from a state inside MindSpore's operator, which "
            f"cannot be set: a resumed run draws other numbers, so it will not have the bits of an "
            f"undisturbed one. Regularise by weight decay, or draw masks in the data set"
        )
    return found


def _draws(cell: Any) -> bool:
    """A dropout that drops something."""
    drops = getattr(cell, "p", None) != 0 and getattr(cell, "keep_prob", None) != 1
    return isinstance(cell, RANDOM) and drops


def listed(names: list[str]) -> str:
    """The first few of some layers' names, in words."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(name or "the model itself" for name in names[:_SHOWN]) + more
