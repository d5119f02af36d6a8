"""Shards that are kept twice: by whom, and how a step on both is taken back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from orchestrator.engine.torch.comm.tensors import bytes_of


def mirror_distance(nodes: Sequence[str]) -> int:
    """How many places before a rank the one is whose shard it keeps, too: on another node, for as
    many ranks as can be, so that no shard is lost with a node.

    >>> mirror_distance(["a", "a", "b", "b", "c", "c"])
    2
    >>> mirror_distance(["a", "a"]), mirror_distance(["a", "a", "a", "b"])
    (1, 1)
    """
    ranks = len(nodes)

    def apart(distance: int) -> int:
        return sum(nodes[r] != nodes[(r + distance) % ranks] for r in range(ranks))

    return max(range(1, max(ranks, 2)), key=apart)  # the first of those that are equally good


class Before:
    """What an optimizer's step changes, as it was. Its memory is kept from one step to the next.

    Args:
        optimizer: whose state is looked after; its own groups it leaves alone.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._kept: dict[Tensor, tuple[Tensor, dict[str, Any]]] = {}
        self._may_go_back = False

    def bytes_kept(self) -> int:
        """Memory of what it keeps."""
        tensors = [t for copy, state in self._kept.values() for t in (copy, *state.values())]
        return sum(bytes_of(t) for t in tensors if isinstance(t, Tensor))

    def keep(self, weights: Iterable[Tensor]) -> None:
        """The optimizer is about to step on these."""
        for weight in weights:
            copy, state = self._kept.get(weight, (None, {}))
            now = self._optimizer.state.get(weight, {})
            self._kept[weight] = _copied(weight, copy), _all_copied(now, state)
        self._may_go_back = True

    def forget(self) -> None:
        """What was stepped stays."""
        self._may_go_back = False

    def restore(self) -> None:
        """All is as it was; nothing to do where nothing was stepped, or it was to stay."""
        for weight, (copy, state) in self._kept.items() if self._may_go_back else ():
            weight.copy_(copy)
            if state:
                self._optimizer.state[weight] = _all_copied(state, {})
            else:
                self._optimizer.state.pop(weight, None)
        self._may_go_back = False


def _all_copied(state: Mapping[str, Any], into: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _copied(value, into.get(key)) if isinstance(value, Tensor) else value
        for key, value in state.items()
    }


def _copied(value: Tensor, into: Tensor | None) -> Tensor:
    with torch.no_grad():
        return value.detach().clone() if into is None else into.copy_(value)
