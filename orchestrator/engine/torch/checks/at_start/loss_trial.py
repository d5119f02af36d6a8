"""Tries a job's loss before training, to tell a mean from a sum: the commonest mistake with it.

The same two samples are taken once and twice. A sum is then twice as large, a mean is not. It
cannot be seen later: with micro-batches of equal size a mean only scales the learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.nn import Module

from orchestrator.engine.torch.loader import collate_of

_SAMPLES = 2
_NEARLY = 0.25  # halfway, on a scale where a mean grows by 0 and a sum by 1


@contextmanager
def as_before(model: Module) -> Generator[None]:
    """Evaluation mode meanwhile. Modes, buffers and frozen parameters are as before afterwards."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    kept = [(tensor, tensor.clone()) for tensor in (*model.buffers(), *frozen)]
    modes = {layer: layer.training for layer in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for layer, training in modes.items():
            layer.training = training
        with torch.no_grad():
            for tensor, before in kept:
                tensor.copy_(before)


def loss_warning(
    job: Any,
    model: Module,
    dataset: Any,
    *,
    prepare: Callable[[Any], Any],
    forward: Callable[[], AbstractContextManager[Any]],
) -> list[str]:
    """A sentence when `Loss.total` or `Loss.weight` does not grow with the number of samples.

    The model is in evaluation mode meanwhile, and its buffers are as before afterwards. Not
    collective.

    Args:
        job: its `loss` is called twice, with 2 and with 4 samples.
        model: of the job.
        dataset: of the job; nothing is tried when it has less than 2 samples.
        prepare: moves a batch to where the model computes.
        forward: the context in which forward computations run.
    """
    if len(dataset) < _SAMPLES:
        return []
    samples = [dataset[number] for number in range(_SAMPLES)]
    found: list[tuple[Any, Any]] = []
    with as_before(model):
        for times in (1, 2):
            batch = prepare(collate_of(job)(samples * times))
            with torch.no_grad(), forward():
                loss = job.loss(model, batch)
            sums = _number(getattr(loss, "total", None)), _number(getattr(loss, "weight", None))
            if None in sums:
                return []  # no Loss, or no sums: the first micro-step refuses it
            found.append(sums)
    (total, weight), (total_twice, weight_twice) = found
    for what, once, twice in (("total", total, total_twice), ("weight", weight, weight_twice)):
        if once and abs(twice - once) < _NEARLY * abs(once):
            sentence = (
                f"Loss.{what} does not grow with the number of samples ({once:.4g} for two of "
                f"them, {twice:.4g} for the same two twice), so it is not a sum: the update may "
                "depend on how it is split. Use reduction='sum', and the number of samples as the "
                "weight"
            )
            return [sentence]
    return []


def _number(value: Any) -> float | None:
    """One number, or None for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
