"""A job's `loss` in a form that MindSpore's graph compiler can differentiate.

Inside a graph the compiler cannot build a `Loss`: it falls back to Python for it and *silently cuts
the gradient there*. So the compiled step uses a twin of `job.loss` in which the name `Loss` stands
for a plain tuple. Whether that was enough is checked on the first micro-batch (see `accumulator`).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.job import Job, Loss

Sums = tuple[Any, Any, Any]


def as_sums(total: Any, weight: Any, metrics: Mapping[str, Any] | None = None) -> Sums:
    """What stands for `Loss` in a graph."""
    return total, weight, metrics


def python_loss(job: Job) -> Callable[[Any, Any], Sums]:
    """`job.loss` as a function that gives a tuple, for PyNative mode."""

    def loss(model: Any, batch: Any) -> Sums:
        found = job.loss(model, batch)
        return found.total, found.weight, found.metrics

    return loss


def compiled_loss(job: Job) -> Callable[[Any, Any], Sums]:
    """The twin of `job.loss` for graphs."""
    method: Any = type(job).loss
    names = {
        key: (as_sums if value is Loss else value)
        for key, value in method.__globals__.items()
        if key == "__builtins__" or not (key.startswith("__") and key.endswith("__"))
    }
    # The compiler looks global names up in the function's module, not in its __globals__.
    twin = types.ModuleType(f"{method.__module__}_in_a_graph")
    twin.__dict__.update(names)
    sys.modules[twin.__name__] = twin
    function = types.FunctionType(
        method.__code__, twin.__dict__, method.__name__, method.__defaults__, method.__closure__
    )
    function.__kwdefaults__ = method.__kwdefaults__
    function.__module__ = twin.__name__
    return types.MethodType(function, job)
