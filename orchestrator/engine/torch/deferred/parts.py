"""What windows that are computed at the boundary are computed with, as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.nn import Module

from orchestrator.engine.settings import EngineSettings
from orchestrator.engine.torch import loader
from orchestrator.engine.torch.accumulator import Accumulator
from orchestrator.engine.torch.gradients.chunks import Leaves


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """One rank's job and what trains it.

    Attributes:
        job, model, settings: of the engine.
        accumulator: takes the gradients; its windows are begun and ended by the engine.
        prepare: moves a batch to where the model computes.
        leaves: numbers micro-batches as `Accumulator.backward` wants them.
    """

    job: Any
    model: Module
    settings: EngineSettings
    accumulator: Accumulator
    prepare: Callable[[Any], Any]
    leaves: Leaves

    def any_batch(self) -> Any:
        """A batch of one sample, to try things with."""
        return loader.collate_of(self.job)([self.job.dataset()[0]])
