"""`engine.norm`: batch norm sees one micro-batch; it is named, frozen, or replaced.

With `frozen` or `group` a sample's output is its own again, so any split gives the update of one
big batch. The same choices as torch's, but for `exact`.
"""

from __future__ import annotations

from typing import Any

from mindspore import nn

from orchestrator.engine.mindspore.model.model_warnings import batch_norms, listed

LARGEST_GROUPS, LEAST_CHANNELS = 32, 4


def with_norms(model: nn.Cell, choice: str) -> tuple[nn.Cell, list[str]]:
    """The model with its batch norms frozen, replaced or left; and a sentence about it.

    Args:
        model: is changed in place, unless it is a batch norm itself.
        choice: "warn", which leaves it to `advice` to warn; "frozen"; or "group".
    """
    found = batch_norms(model)
    if choice == "warn" or not found:
        return model, []
    if choice == "frozen":
        for layer in found.values():
            layer.use_batch_statistics = False
        what = "keeps the statistics that it has (load trained ones in model())"
    else:
        model = _replaced(model, found)
        what = "was replaced by group norm"
    return model, [f"engine.norm={choice}: batch norm in {listed(list(found))} {what}"]


def _replaced(model: nn.Cell, found: dict[str, Any]) -> nn.Cell:
    made = {id(layer): _grouped(layer) for layer in found.values()}
    names = [(parameter, parameter.name) for parameter in model.get_parameters()]
    for _, parent in list(model.cells_and_names()):
        held: Any = parent
        for child, layer in list(parent.name_cells().items()):
            if id(layer) not in made:
                continue
            if isinstance(parent, nn.SequentialCell | nn.CellList):
                held[int(child)] = made[id(layer)]
            else:
                setattr(held, child, made[id(layer)])
    for parameter, name in names:  # containers add their prefix once more
        parameter.name = name
    return made.get(id(model), model)


def _grouped(layer: Any) -> nn.Cell:
    """A group norm with the batch norm's own weight and bias.

    Channels of vectors have no places to take statistics over, so all of them make one group.
    """
    channels = int(layer.num_features)
    vectors = isinstance(layer, nn.BatchNorm1d)
    most = 1 if vectors else max(1, min(LARGEST_GROUPS, channels // LEAST_CHANNELS))
    groups = next(count for count in range(most, 0, -1) if channels % count == 0)
    made: Any = nn.GroupNorm(groups, channels, eps=layer.eps)
    made.gamma, made.beta = layer.gamma, layer.beta
    return made
