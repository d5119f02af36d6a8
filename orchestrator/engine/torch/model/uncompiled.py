"""Optimizers without torch's compiler: to load it takes as long as to load torch itself.

A first step, and the first call of four other methods of any optimizer, loads the compiler, only to
tell it to leave them alone. As long as nobody else has loaded it nothing can be compiled, so there
is nothing to tell: they are called as they are. From the moment that a job loads it
(`torch.compile` does), torch's own way is taken.

See `_use_grad_for_differentiable` in `torch/optim/optimizer.py`, and `torch/_compile.py`. Where a
version of torch does it in another way, this changes nothing, and ranks only start later.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch.optim import Optimizer

COMPILER = "torch._dynamo"
DECIDED = "__dynamo_disable"  # where torch keeps, on the function, what the wrapper shall call


def spare_the_compiler() -> None:
    """For all optimizers of this process; before the first is made. Again it changes nothing."""
    for wrapper in vars(Optimizer).values():
        if isinstance(wrapper, FunctionType) and DECIDED in wrapper.__code__.co_consts:
            _spare(wrapper, vars(wrapper)["__wrapped__"])
    for kind in _kinds(Optimizer):
        step = vars(kind).get("step")
        if isinstance(step, FunctionType) and "graph_break" in step.__code__.co_names:
            kind.step = _plain_step(step, vars(step)["__wrapped__"])


def _kinds(of: type[Optimizer]) -> Iterator[type[Optimizer]]:
    for kind in of.__subclasses__():
        yield kind
        yield from _kinds(kind)


def _spare(wrapper: Callable[..., Any], method: Callable[..., Any]) -> None:
    def as_it_is(*arguments: Any, **named: Any) -> Any:
        if COMPILER not in sys.modules:
            return method(*arguments, **named)
        delattr(method, DECIDED)
        return wrapper(*arguments, **named)

    if not hasattr(method, DECIDED):
        setattr(method, DECIDED, as_it_is)


def _plain_step(wrapper: Callable[..., Any], step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def as_it_is(self: Optimizer, *arguments: Any, **named: Any) -> Any:
        if COMPILER in sys.modules:
            return wrapper(self, *arguments, **named)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *arguments, **named)

    return as_it_is
