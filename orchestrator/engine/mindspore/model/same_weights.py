"""Do all ranks have the same weights? MindSpore's digests for `engine.common.replicas`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mindspore import nn

from orchestrator.engine.common.replicas import Piece, Replicas
from orchestrator.engine.mindspore.model.model_warnings import BATCH_NORMS


def replicas_of(
    model: nn.Cell, gather: Callable[[Sequence[float]], list[list[float]]], ranks: int
) -> Replicas:
    """What watches over the equality of a model's parameters on all ranks. Not collective.

    The running statistics of batch norms are parameters here, too, and every rank has its own.
    """
    own = {
        id(statistics)
        for _, cell in model.cells_and_names()
        if isinstance(cell, BATCH_NORMS)
        for statistics in (cell.moving_mean, cell.moving_variance)
    }
    parameters: list[Any] = [p for p in model.get_parameters() if id(p) not in own]

    def digests(pieces: Sequence[Piece]) -> list[int]:
        held: dict[int, Any] = {}
        found: list[int] = []
        for piece in pieces:
            if piece.number not in held:
                array = parameters[piece.number].asnumpy()
                held = {piece.number: np.ascontiguousarray(array).reshape(-1)}
            data = held[piece.number][piece.start : piece.end].view(np.uint8).data
            found.append(int.from_bytes(hashlib.sha256(data).digest()[:8], "little"))
        return found

    return Replicas(
        [parameter.name for parameter in parameters],
        [int(parameter.size) for parameter in parameters],
        [int(parameter.itemsize) for parameter in parameters],
        digests=digests,
        gather=gather,
        ranks=ranks,
    )
