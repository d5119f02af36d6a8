"""One interface for all contenders: this rank's micro-batches in, one update done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from benchmarks.workload import Batch
from orchestrator.engine.torch import TorchGroup


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The place where a contender trains.

    Attributes:
        group: all ranks; the framework's default group for those who know no other.
        rate: of AdamW.
    """

    group: TorchGroup
    rate: float

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer, the same for all contenders but for the parameters."""
        return torch.optim.AdamW(model.parameters(), lr=self.rate)


class Contender:
    """Trains its own copy of a model, as its documentation tells users to.

    Args:
        model: the contender may wrap it.
        setting: where.
    """

    name: ClassVar[str]
    needs: ClassVar[str | None] = None
    """Package beyond torch, by its name for import."""

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        raise NotImplementedError

    def update(self, batches: Sequence[Batch], *, first: int, leaves: int) -> Tensor:
        """Run one update. Collective.

        Args:
            batches: this rank's micro-batches.
            first: the first one's number in the update.
            leaves: micro-batches of all ranks together.

        Returns:
            The mean of the micro-batches' mean losses, detached.
        """
        self.begin(steps=len(batches), first=first, leaves=leaves)
        losses = [
            self.micro_step(batch, step, last=step == len(batches) - 1).detach()
            for step, batch in enumerate(batches)
        ]
        self.end()
        return torch.stack(losses).mean()

    def begin(self, *, steps: int, first: int, leaves: int) -> None:
        """Prepare an update; most contenders need only `steps`, to divide by."""
        raise NotImplementedError

    def micro_step(self, batch: Batch, step: int, *, last: bool) -> Tensor:
        """Run forward and backward; return the mean loss."""
        raise NotImplementedError

    def end(self) -> None:
        """Step the optimizer."""
        raise NotImplementedError
