"""Trials of a job's loss before training: is it a sum, and in which order do gradients come?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from orchestrator.engine.torch.buffers import named_parameters, trained
from orchestrator.engine.torch.group import BaseGroup
from orchestrator.engine.torch.loader import check_dataset, collate_of

_SAMPLES = 2
_NEARLY = 0.25  # halfway, on a scale where a mean grows by 0 and a sum by 1


@contextmanager
def unchanged_model(model: Module) -> Generator[None]:
    """Switch to evaluation mode; restore modes, buffers and frozen parameters afterwards."""
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
    """Return a sentence when `Loss.total` or `Loss.weight` does not grow with the number of
    samples.

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
    with unchanged_model(model):
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


# ------------------------------------------------------------------ Order of buckets
# Buckets in the order in which a backward reaches the parameters leave earliest. The reverse of
# the model's order fails where layers are not declared as they are called, so rank 0 tries a
# backward on two samples before training, and all ranks take its order. It is a function of the
# job alone, so a resumed run has the same buckets, and the same bits.


def agree_on_bucket_order(
    job: Any,
    model: Module,
    group: BaseGroup,
    *,
    prepare: Callable[[Any], Any],
    forward: Callable[[], AbstractContextManager[Any]],
) -> list[int]:
    """Return the trained parameters' numbers in the order in which gradients come. Collective.

    Those that the trial does not reach come last, in the reverse of the model's order. The model
    is in evaluation mode meanwhile, and its buffers are as before afterwards.

    Args:
        job: its `loss` is called once, on rank 0.
        model: of the job.
        group: the ranks.
        prepare: moves a batch to where the model computes.
        forward: the context in which forward computations run.
    """
    parameters = [parameter for _, parameter in trained(named_parameters(model))]
    order = list(reversed(range(len(parameters))))
    if group.rank == 0:
        group.silence.begin("while rank 0 tried a backward")
        try:
            seen = _tried(job, model, parameters, prepare, forward)
        finally:
            group.silence.end()
        order = seen + [number for number in order if number not in set(seen)]
    shared = torch.tensor(order, device=group.device)
    group.broadcast(shared)
    return shared.tolist()


def _tried(
    job: Any,
    model: Module,
    parameters: list[Tensor],
    prepare: Callable[[Any], Any],
    forward: Callable[[], AbstractContextManager[Any]],
) -> list[int]:
    dataset = job.dataset()
    check_dataset(dataset)
    samples = [dataset[number] for number in range(min(_SAMPLES, len(dataset)))]
    if not samples:
        return []
    seen: dict[int, None] = {}

    def hook_of(number: int) -> Callable[[Tensor], None]:
        def ready(parameter: Tensor) -> None:
            seen.setdefault(number)
            parameter.grad = None

        return ready

    hooks = [
        parameter.register_post_accumulate_grad_hook(hook_of(number))
        for number, parameter in enumerate(parameters)
    ]
    try:
        with unchanged_model(model):
            with forward():
                # A shallow copy, so that what a job counts in its own attributes is not counted.
                loss = copy.copy(job).loss(model, prepare(collate_of(job)(samples)))
            total = getattr(loss, "total", None)
            if isinstance(total, Tensor) and total.requires_grad and total.numel() == 1:
                total.backward()  # what is none of this, the first micro-step refuses
    finally:
        for hook in hooks:
            hook.remove()
    return list(seen)
