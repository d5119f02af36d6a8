"""What a user should know of a model before training it in pieces, with the remedies."""

from __future__ import annotations

from torch.nn import Embedding, EmbeddingBag, Module

from orchestrator.engine.torch.norms import batch_norms, listed

IN_A_LOOP = (
    ". In a loop of your own, model, _ = with_norms(model, 'group') or 'frozen' does the same, "
    "before the optimizer is built"
)


def norm_advice(names: list[str]) -> str:
    """A sentence about batch norms of these names."""
    return (
        f"batch norm in {listed(names)} sees one micro-batch at a time, so the update is not "
        "that of one big batch, and running statistics differ between ranks. Use "
        "engine.norm=group (GroupNorm in its place), engine.norm=frozen (freeze the statistics "
        "that it has), engine.norm=exact (those of the whole update, for small nets), or take "
        "one micro-step of the whole batch on one rank"
    )


def advice(model: Module) -> list[str]:
    """Sentences about layers that do not do what one big batch would, or do it slowly."""
    found: list[str] = []
    norms = batch_norms(model)
    if norms:
        found.append(norm_advice(norms))
    sparse = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, (Embedding, EmbeddingBag)) and layer.sparse
    ]
    if sparse:
        found.append(
            f"sparse gradients of {listed(sparse)} are accumulated as dense ones; sparse=False "
            "says so and is faster"
        )
    return found
