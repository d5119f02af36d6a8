"""Has every parameter say when a backward has added its gradient: to one listener, not two."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Ears:
    """The hooks of one listener."""

    handles: list[Any]
    parameters: Sequence[Tensor]

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
    parameters = [parameter for _, parameter in named]
    for parameter in parameters:
        _LISTENERS[parameter] = itself

    def hook_of(number: int) -> Callable[[Tensor], None]:
        def ready(_: Tensor) -> None:
            living = itself()
            if living is not None:
                living.gradient_ready(number)

        return ready

    handles = [
        parameter.register_post_accumulate_grad_hook(hook_of(number))
        for number, parameter in enumerate(parameters)
    ]
    return Ears(handles, parameters)


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
