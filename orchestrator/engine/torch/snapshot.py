"""The state of one moment, to be written while training goes on.

Weights and an optimizer's state change in one place, the optimizer's step, at a boundary. So what
is large of them is copied by whoever writes, while the next window computes (`take`), and the next
boundary waits until that is done; usually it finds it done. What a window itself may change
(buffers, small tensors such as a rate) is copied at once. Whether copied or not, the same bytes are
written.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from orchestrator.engine.torch.accumulator import Accumulator
from orchestrator.engine.torch.state import (
    OPTIMIZER,
    WEIGHTS,
    model_state,
    pack,
    prepared,
    write_prepared,
)

SMALL = 4096
"""Numbers of a tensor that is copied at once."""


class Snapshot:
    """A checkpoint's tensors and the rest of it. Until `keep` they are those that train.

    Args:
        gathered: the state of an optimizer in shards, put together for this; None: it has none.

    Attributes:
        taken: nobody copies any more what trains, so it may change.

    Raises:
        RuntimeError: it is in shards, and was not gathered.
    """

    def __init__(
        self, model: Module, accumulator: Accumulator, gathered: Mapping[str, Any] | None
    ) -> None:
        if gathered is None and accumulator.sharded:
            raise RuntimeError("a sharded state is saved on rank 0, after gather_state()")
        optimizer = accumulator.optimizer_state() if gathered is None else gathered
        assert optimizer is not None  # noqa: S101  # it is in no shards
        precision = accumulator.precision.state()
        weights, rest = model_state(model)
        states: dict[str, Tensor] = {}
        packed = pack(optimizer, states, "")
        self._extra = {"model": rest, "optimizer": packed, "precision": precision}
        self._files = {WEIGHTS: prepared(weights), OPTIMIZER: prepared(states)}
        self._lasting = {parameter.data_ptr() for parameter in model.parameters()}
        self._own = gathered is not None
        self._later: list[tuple[dict[str, Tensor], str]] = []
        self.taken = threading.Event()

    def keep(self) -> Snapshot:
        """From now on windows may begin; the next boundary has to wait for `taken`."""
        for name, (tensors, _) in self._files.items():
            for key, tensor in tensors.items():
                steady = name == OPTIMIZER or tensor.data_ptr() in self._lasting
                if steady and tensor.numel() > SMALL:
                    if not (self._own and name == OPTIMIZER):
                        self._later.append((tensors, key))
                else:
                    tensors[key] = _copy(tensor)
        return self

    def take(self) -> None:
        """Copy the rest, in any thread. Whatever comes of it, nobody waits for it any more."""
        try:
            for tensors, key in self._later:
                tensors[key] = _copy(tensors[key])
        finally:
            self.taken.set()

    def save_state(self, folder: Path) -> dict[str, Any]:
        """Write weights and optimizer as safetensors; give the rest as JSON."""
        for name, (tensors, metadata) in self._files.items():
            write_prepared(folder / name, tensors, metadata)
        self._files.clear()  # copies are large
        return self._extra


def _copy(tensor: Tensor) -> Tensor:
    """In the host's memory, contiguous."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
