"""What a user should know of a model before training it in pieces, with the remedies."""

from __future__ import annotations

from torch.nn import Embedding, EmbeddingBag, Module
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]  # the common base

_SHOWN = 5


def advice(model: Module) -> list[str]:
    """Sentences about layers that do not do what one big batch would, or do it slowly."""
    found: list[str] = []
    norms = [name for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)]
    if norms:
        found.append(
            f"batch norm in {_listed(norms)} sees one micro-batch at a time, so the update is not "
            "that of one big batch, and running statistics differ between ranks. Use GroupNorm or "
            "LayerNorm instead, freeze the statistics (layer.eval()), or take one micro-step of "
            "the whole batch on one rank"
        )
    sparse = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, (Embedding, EmbeddingBag)) and layer.sparse
    ]
    if sparse:
        found.append(
            f"sparse gradients of {_listed(sparse)} are accumulated as dense ones; sparse=False "
            "says so and is faster"
        )
    return found


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(name or "the model itself" for name in names[:_SHOWN]) + more
