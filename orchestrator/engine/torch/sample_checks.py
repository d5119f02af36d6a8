"""Checks of a job's data and loss on a few samples, when its first micro-step is done."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import Module

from orchestrator.engine.torch.loader import collate_of
from orchestrator.engine.torch.model import in_evaluation, seed_everything
from orchestrator.errors import JobError
from orchestrator.rundir.warnings import warn

MOST_SAMPLES = 4
TOLERANCE = {"float64": 1e-8, "float32": 1e-3}
"""Relative; other precisions have `LOW_PRECISION_TOLERANCE`."""
LOW_PRECISION_TOLERANCE = 5e-2


def check_samples(
    job: Any,
    model: Module,
    indices: Sequence[int],
    loss_of: Callable[[Any], Any] | None,
    *,
    precision: str,
    seed: int,
) -> None:
    """Check that a job's samples and losses do not depend on how a batch is split. Not collective.

    Warns of random numbers that are drawn for a whole micro-batch. In evaluation mode, compares the
    loss of a few samples together with the sum of the losses of two halves: totals and weights.
    A loss with random numbers of its own, and a compiled model, are not compared.

    Args:
        indices: of the samples of a micro-batch.
        loss_of: gives the `Loss` of a batch; None for a job with `embed`.
        seed: of the random numbers that the check draws.

    Raises:
        JobError: the loss is no sum over samples, and the job does not declare `batch_dependent`.
    """
    dataset, name = job.dataset(), type(job).__name__
    first = list(indices[:MOST_SAMPLES])
    if len(first) < 2 and len(dataset) > 1:
        first.append((first[0] + 1) % len(dataset))
    with _watched_generators(seed) as moved:
        samples = [dataset[index] for index in first]
    if moved and not getattr(job, "augments", False):
        warn(
            f"{name}: dataset[i] draws random numbers, but the class does not set augments = True, "
            f"so what it draws depends on how a batch is split over ranks and micro-steps"
        )
    collate = collate_of(job)
    with _watched_generators(seed) as moved:
        collate(samples)
    if moved:
        warn(
            f"{name}: collate() draws random numbers for a whole micro-batch, so they depend on "
            f"how a batch is split over ranks and micro-steps; draw them in dataset[i], with "
            f"augments = True"
        )
    compiled = any(type(layer).__name__ == "OptimizedModule" for layer in model.modules())
    alone = getattr(job, "talks_in_window", False) or getattr(job, "batch_dependent", False)
    if loss_of is None or compiled or alone or len(samples) < 2:
        return
    half = len(samples) // 2

    def total_and_weight(some: list[Any], seed: int = seed) -> tuple[float, float]:
        seed_everything(seed)
        loss = loss_of(collate(some))
        return _number(loss.total), _number(loss.weight)

    with in_evaluation(model), kept_buffers(model):
        try:
            together = total_and_weight(samples)
            if total_and_weight(samples, seed + 1) != together:
                return
            apart = [total_and_weight(samples[:half]), total_and_weight(samples[half:])]
        except Exception as error:  # noqa: BLE001  # of the job's own code, on so few samples
            warn(
                f"{name}.loss() fails on {half} or {len(samples)} samples in evaluation mode "
                f"({type(error).__name__}: {error}), so it was not checked whether it is a sum"
            )
            return
    tolerance = TOLERANCE.get(precision, LOW_PRECISION_TOLERANCE)
    if _differ(together[0], [total for total, _ in apart], tolerance) or _differ(
        together[1], [weight for _, weight in apart], TOLERANCE["float32"]
    ):
        (total, weight), (left, right) = together, apart
        raise JobError(
            f"{name}.loss() is not a sum over samples, so updates would depend on how a batch is "
            f"split: total and weight of {len(samples)} samples are {total:.6g} and {weight:g}, "
            f"but of {half} and {len(samples) - half} of them {left[0]:.6g} + {right[0]:.6g} and "
            f"{left[1]:g} + {right[1]:g}. Give sums, without a mean, maximum or normalisation over "
            f"the micro-batch. If samples need each other, define embed() and "
            f"loss_of_embeddings(). To accept it, set batch_dependent = True in the class"
        )


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def _differ(whole: float, parts: Sequence[float], tolerance: float) -> bool:
    size = max(abs(whole), sum(map(abs, parts)))
    return abs(whole - sum(parts)) > tolerance * size


@contextlib.contextmanager
def _watched_generators(seed: int) -> Generator[list[bool]]:
    """Seed the global generators; on leaving, put an entry into the list if one has moved."""
    seed_everything(seed)
    before, moved = _generators(), list[bool]()
    yield moved
    if before != _generators():
        moved.append(True)


def _generators() -> tuple[Any, ...]:
    """Return the states of Python's, NumPy's and torch's global generators."""
    numpy_state: Any = np.random.get_state()
    torch_state = torch.get_rng_state().numpy().tobytes()
    return random.getstate(), numpy_state[1].tobytes(), numpy_state[2:], torch_state


@contextlib.contextmanager
def kept_buffers(model: Module) -> Generator[None]:
    """Give the model's buffers their values back, which a loss may change."""
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, before in kept:
            buffer.detach().copy_(before)
