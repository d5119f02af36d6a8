"""Has every parameter say when a backward has added its gradient: to one listener, not two.

Saying so takes most of what an accumulator costs in a micro-step, since it happens in Python once
for each parameter. Where nothing has to be done about a gradient but to know that it came, the hook
only counts it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from orchestrator.errors import ConfigError


class Listener(Protocol):
    """Who is told. It is held weakly: hooks on a model keep no accumulator alive."""

    def gradient_ready(self, parameter: int) -> None:
        """The gradient of parameter number `parameter` is there, in mid-backward."""
        ...


_LISTENERS: Any = WeakTensorKeyDictionary()
"""By parameter a weak reference to who listens."""


@dataclass(slots=True)
class Ears:
    """The hooks of one listener.

    Attributes:
        counts: while it is set, gradients are counted there, by parameter, and nobody is told.
    """

    parameters: Sequence[Tensor]
    handles: list[Any] = field(default_factory=list[Any])
    counts: list[int] | None = None

    @contextmanager
    def counting(self, counts: list[int] | None) -> Generator[None]:
        """Count gradients in `counts` meanwhile; with None the listener is told of each."""
        self.counts = counts
        try:
            yield
        finally:
            self.counts = None

    def remove(self) -> None:
        """Hear no more; another may."""
        for handle in self.handles:
            handle.remove()
        for parameter in self.parameters:
            _LISTENERS.pop(parameter, None)


def listen(listener: Listener, named: Sequence[tuple[str, Tensor]]) -> Ears:
    """Tell `listener` of every gradient, as long as it lives.

    Raises:
        ConfigError: another one is told of one of them.
    """
    _refuse_taken(named)
    itself = weakref.ref(listener)
    ears = Ears([parameter for _, parameter in named])
    for parameter in ears.parameters:
        _LISTENERS[parameter] = itself

    def hook_of(number: int) -> Callable[[Tensor], None]:
        def ready(_: Tensor) -> None:
            if ears.counts is not None:
                ears.counts[number] += 1
            elif (living := itself()) is not None:
                living.gradient_ready(number)

        return ready

    ears.handles += [
        parameter.register_post_accumulate_grad_hook(hook_of(number))
        for number, parameter in enumerate(ears.parameters)
    ]
    return ears


def _refuse_taken(named: Sequence[tuple[str, Tensor]]) -> None:
    def taken() -> list[str]:
        return [name for name, p in named if p in _LISTENERS and _LISTENERS[p]() is not None]

    if taken():
        gc.collect()  # one that nobody holds any more may only wait for that
    if names := taken():
        raise ConfigError(
            f"parameter {names[0]} belongs to another accumulator: one model has one, and each "
            "parameter's gradient is reduced once. close() the other one first"
        )
