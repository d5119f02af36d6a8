"""A job's `loss` in a form that MindSpore's graph compiler can differentiate.

Inside a graph the compiler cannot build a `Loss`: it falls back to Python for it and *silently cuts
the gradient there*. So the compiled step uses a twin of `job.loss` in which the name `Loss` stands
for a plain tuple. Whether that was enough is checked on the first micro-batch (see `accumulator`).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from mindspore import Tensor

from orchestrator.engine.common.metric_names import check_metric_names
from orchestrator.errors import JobError
from orchestrator.job import Job, Loss

Sums = tuple[Any, Any, Any]


def as_sums(total: Any, weight: Any, metrics: Mapping[str, Any] | None = None) -> Sums:
    """What stands for `Loss` in a graph."""
    return total, weight, metrics


def python_loss(job: Job) -> Callable[[Any, Any], Sums]:
    """`job.loss` as a function that gives a tuple, for PyNative mode.

    It raises `JobError` when the job's loss is not what the contract says.
    """
    names = tuple(getattr(job, "metric_names", ()))

    def loss(model: Any, batch: Any) -> Sums:
        found = job.loss(model, batch)
        _check(found, names)
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


def _check(loss: Any, names: Sequence[str]) -> None:
    """Raise `JobError` for what is no `Loss`, or one that cannot be summed."""
    if not isinstance(loss, Loss):
        told = "a plain tensor" if isinstance(loss, Tensor) else type(loss).__name__
        raise JobError(
            f"loss() must return Loss(total, weight), but returned {told}: a sum and what to "
            "divide it by; from orchestrator import Loss"
        )
    if not isinstance(loss.total, Tensor) or loss.total.size != 1:
        raise JobError(
            f"Loss.total must be a real scalar tensor, but is {_told(loss.total)}; sum it up"
        )
    metrics: Any = loss.metrics
    if not isinstance(metrics, Mapping):
        raise JobError(f"Loss.metrics must be a dictionary, but is {_told(metrics)}")
    for what, value in (("weight", loss.weight), *loss.metrics.items()):
        one = value.size == 1 if isinstance(value, Tensor) else isinstance(value, Real)
        if not one:
            named = "weight" if what == "weight" else f"metrics['{what}']"
            raise JobError(f"Loss.{named} must be a real number, but is {_told(value)}")
    check_metric_names(loss.metrics, names)


def _told(value: Any) -> str:
    return f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.40}"
