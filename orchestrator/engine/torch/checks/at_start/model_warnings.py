"""What a user should know of a model before training it in pieces, with the remedies."""

from __future__ import annotations

from torch.nn import Embedding, EmbeddingBag, Module
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]  # the common base

from orchestrator.engine.torch.batch_norm.modes import listed

IN_A_LOOP = (
    ". In a loop of your own, model, _ = with_norms(model, 'group') or 'frozen' does the same, "
    "before the optimizer is built"
)


def norm_advice(names: list[str], *, apart: bool) -> str:
    """A sentence about batch norms of these names; `apart`: ranks have statistics of their own."""
    differ = ", and running statistics differ between ranks" * apart
    return (
        f"batch norm in {listed(names)} sees one micro-batch at a time, so the update is not "
        f"that of one big batch{differ}. Use "
        "engine.norm=group (GroupNorm in its place), engine.norm=frozen (freeze the statistics "
        "that it has), or take one micro-step of the whole batch on one rank"
    )


def advice(model: Module, *, ranks: int = 2, micro_batches: int | None = None) -> list[str]:
    """Sentences about layers that do not do what one big batch would, or do it slowly.

    Args:
        ranks: how many train it.
        micro_batches: of an update, over all ranks; None for many.
    """
    found: list[str] = []
    layers = dict(model.named_modules())
    norms = [name for name, layer in layers.items() if sees_its_batch(layer)]
    if norms and micro_batches != 1:
        kept = any(getattr(layers[name], "running_mean", None) is not None for name in norms)
        found.append(norm_advice(norms, apart=kept and ranks > 1))
    sparse = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, (Embedding, EmbeddingBag))
        and layer.sparse
        and layer.weight.requires_grad
    ]
    if sparse:
        found.append(
            f"sparse gradients of {listed(sparse)} are accumulated as dense ones; sparse=False "
            "says so and is faster"
        )
    return found


def sees_its_batch(layer: Module) -> bool:
    """A batch norm in evaluation mode that has statistics uses those."""
    return isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None)
