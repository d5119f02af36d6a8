"""In which order a backward reaches the parameters: buckets in that order can leave the earliest.

The reverse of the model's order is a guess that fails where layers are not declared as they are
called. So rank 0 tries a backward on two samples before training, and all ranks take its order. It
is a function of the job alone, so a resumed run has the same buckets, and the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from orchestrator.engine.torch.checks.at_start.loss_trial import as_before
from orchestrator.engine.torch.comm.base_group import BaseGroup
from orchestrator.engine.torch.gradients.layout import named_parameters, trained
from orchestrator.engine.torch.loader import check_dataset, collate_of

_SAMPLES = 2


def agreed_order(
    job: Any,
    model: Module,
    group: BaseGroup,
    *,
    prepare: Callable[[Any], Any],
    forward: Callable[[], AbstractContextManager[Any]],
) -> list[int]:
    """Numbers of the trained parameters in the order in which gradients come. Collective.

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
        group.silence.keep("while rank 0 tried a backward")
        try:
            seen = _tried(job, model, parameters, prepare, forward)
        finally:
            group.silence.end()
        order = seen + [number for number in order if number not in set(seen)]
    told = torch.tensor(order, device=group.device)
    group.broadcast(told)
    return told.tolist()


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
        with as_before(model):
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
