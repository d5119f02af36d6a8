"""What a user writes: a job. No framework is imported here, so a job's file decides which it needs.

A job is any class with `model`, `dataset` and `loss`; deriving from `Job` only saves typing. The
keys under `job:` in the configuration (all but `_target_`) are its constructor's arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

REQUIRED_METHODS = ("model", "dataset", "loss")


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of one micro-batch as a *sum*, and what that sum is to be divided by.

    The update's loss is (sum of `total`) / (sum of `weight`) over every micro-batch of every rank,
    and so is its gradient: exact for any split. Give sums, never means.

    Attributes:
        total: scalar tensor with a graph: the sum of the samples' (or tokens') losses.
        weight: what to divide by: the number of samples, tokens, or the sum of sample weights.
        metrics: further sums by name, averaged in the same way (say, how many were right). Their
            names must be those in the job's `metric_names`.
    """

    total: Any
    weight: float
    metrics: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Job:
    """Base class of jobs: the optional parts with their defaults.

    Attributes:
        framework: "torch" or "mindspore".
        metric_names: names that `loss` fills in `Loss.metrics`. Declared, because a rank that has
            no samples in a window has to send the same numbers as all the others.
        augments: set it to True when `dataset[i]` draws random numbers: every sample then gets
            its own generator state from (seed, update, place in the update), whoever computes it.
    """

    framework: ClassVar[str] = "torch"
    metric_names: ClassVar[tuple[str, ...]] = ()
    augments: ClassVar[bool] = False

    def model(self) -> Any:
        """Build the model. Called once on every rank, with the same random seed."""
        raise NotImplementedError(f"{type(self).__name__} must define model()")

    def dataset(self) -> Any:
        """Give the training data: anything with `len()` and `[index]`, the same on every rank."""
        raise NotImplementedError(f"{type(self).__name__} must define dataset()")

    def loss(self, model: Any, batch: Any) -> Loss:
        """The loss of one micro-batch, as sums. No collective may be called here."""
        raise NotImplementedError(f"{type(self).__name__} must define loss(model, batch)")

    def optimizer(self, model: Any) -> Any | None:
        """Build an own optimizer, or give None for the one that the configuration names."""
        del model
        return None

    def evaluate(self, model: Any) -> dict[str, float]:
        """Held-out figures by name, computed on rank 0 while the others wait. Empty by default."""
        del model
        return {}

    def collate(self, samples: list[Any]) -> Any:
        """Make a batch of samples; None (the default) stands for the framework's own way."""
        del samples
        return None
