"""Has every parameter say when a backward has added its gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor


class Listener(Protocol):
    """Who is told. It is held weakly: hooks on a model keep no accumulator alive."""

    def gradient_ready(self, parameter: int) -> None:
        """The gradient of parameter number `parameter` is there, in mid-backward."""
        ...


def listen(listener: Listener, parameters: Sequence[Tensor]) -> list[Any]:
    """Tell `listener` of every gradient, as long as it lives; gives the hooks' handles."""
    itself = weakref.ref(listener)

    def hook_of(number: int) -> Callable[[Tensor], None]:
        def ready(_: Tensor) -> None:
            living = itself()
            if living is not None:
                living.gradient_ready(number)

        return ready

    return [
        parameter.register_post_accumulate_grad_hook(hook_of(number))
        for number, parameter in enumerate(parameters)
    ]
