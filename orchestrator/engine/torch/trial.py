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


class Trial:
    """Calls of a job's loss on rank 0, whose model is in evaluation mode meanwhile.

    Modes, buffers and frozen parameters are as before afterwards; a shallow copy of the job is
    called, so that what it counts in its own attributes is not counted.

    Args:
        prepare: moves a batch to where the model computes.
        forward: the context in which forward computations run.
    """

    def __init__(
        self,
        job: Any,
        model: Module,
        group: BaseGroup,
        *,
        prepare: Callable[[Any], Any],
        forward: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._job, self._model, self._group = copy.copy(job), model, group
        self._prepare, self._forward = prepare, forward

    @contextmanager
    def _samples(self, doing: str) -> Generator[list[Any]]:
        """Yield the first samples; what happens inside is silent and changes no state."""
        dataset = self._job.dataset()
        check_dataset(dataset)
        model = self._model
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        kept = [(tensor, tensor.clone()) for tensor in (*model.buffers(), *frozen)]
        modes = {layer: layer.training for layer in model.modules()}
        self._group.silence.begin(f"while rank 0 tried {doing}")
        model.eval()
        try:
            yield [dataset[number] for number in range(min(_SAMPLES, len(dataset)))]
        finally:
            self._group.silence.end()
            for layer, training in modes.items():
                layer.training = training
            with torch.no_grad():
                for tensor, before in kept:
                    tensor.copy_(before)

    def _loss(self, samples: list[Any]) -> Any:
        batch = self._prepare(collate_of(self._job)(samples))
        with self._forward():
            return self._job.loss(self._model, batch)

    def warnings(self) -> list[str]:
        """Return a sentence when `Loss.total` or `Loss.weight` does not grow with the number of
        samples; on rank 0, whose warnings are shown. Not collective.

        Nothing is tried with a data set of less than 2 samples.
        """
        if self._group.rank != 0:
            return []
        found: list[tuple[Any, Any]] = []
        with self._samples("the loss") as samples, torch.no_grad():
            for times in (1, 2) if len(samples) == _SAMPLES else ():
                loss = self._loss(samples * times)
                found.append((_number(loss, "total"), _number(loss, "weight")))
        if not found or None in (*found[0], *found[1]):
            return []  # no Loss, or no sums: the first micro-step refuses it
        for what, once, twice in zip(("total", "weight"), *found, strict=True):
            if once and abs(twice - once) < _NEARLY * abs(once):
                sentence = (
                    f"Loss.{what} does not grow with the number of samples ({once:.4g} for two of "
                    f"them, {twice:.4g} for the same two twice), so it is not a sum: the update "
                    "may depend on how it is split. Use reduction='sum', and the number of samples "
                    "as the weight"
                )
                return [sentence]
        return []

    # Buckets in the order in which a backward reaches the parameters leave earliest. The reverse of
    # the model's order fails where layers are not declared as they are called, so rank 0 tries a
    # backward before training, and all ranks take its order. It is a function of the job alone, so
    # a resumed run has the same buckets, and the same bits.
    def bucket_order(self) -> list[int]:
        """Return the trained parameters' numbers in the order in which gradients come. Collective.

        Those that the trial does not reach come last, in the reverse of the model's order.
        """
        parameters = [parameter for _, parameter in trained(named_parameters(self._model))]
        order = list(reversed(range(len(parameters))))
        if self._group.rank == 0:
            seen = self._tried_backward(parameters)
            order = seen + [number for number in order if number not in set(seen)]
        shared = torch.tensor(order, device=self._group.device)
        self._group.broadcast(shared)
        return shared.tolist()

    def _tried_backward(self, parameters: list[Tensor]) -> list[int]:
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
            with self._samples("a backward") as samples:
                total = getattr(self._loss(samples), "total", None) if samples else None
                if isinstance(total, Tensor) and total.requires_grad and total.numel() == 1:
                    total.backward()  # what is none of this, the first micro-step refuses
        finally:
            for hook in hooks:
                hook.remove()
        return list(seen)


def _number(loss: Any, name: str) -> Any:
    """Return one of the numbers of `loss`, or None for anything else."""
    try:
        return float(getattr(loss, name))
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None
