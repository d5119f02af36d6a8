"""Plain values that a compiled loss has read: a graph keeps them as constants."""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, nn

from orchestrator.errors import JobError

PLAIN = (bool, int, float, str, np.generic, types.NoneType)


class Constants:
    """Plain values and tensors that a loss and its model read, as they are now.

    Args:
        loss: a function of (model, batch), or a method.
    """

    def __init__(self, loss: Callable[..., Any], model: nn.Cell) -> None:
        self._values: list[tuple[str, Sequence[Mapping[str, Any]], str, Any]] = []
        job = getattr(loss, "__self__", None)
        functions: list[types.FunctionType] = []
        function: Any = getattr(loss, "__func__", loss)
        # The original, whose globals change, of a `compiled_loss`.
        function = getattr(type(job), getattr(function, "__name__", ""), function)
        of_job = _names_read(function, type(job), functions)
        of_cells: set[str] = set(of_job)
        for kind in {type(cell) for _, cell in model.cells_and_names()}:
            of_cells |= _names_read(kind.construct, kind, functions)
        for function in functions:
            for name in function.__code__.co_names:
                self._hold(f"{function.__module__}.{name}", [function.__globals__], name)
                self._hold_object(name, function.__globals__.get(name), of_job)
        for name in of_job:
            self._hold(f"{type(job).__name__}.{name}", _spaces(job), name)
        bookkeeping = vars(nn.Cell())  # such as `training`, which compiled code follows
        for path, cell in model.cells_and_names():
            # PyNative calls of MultiheadAttention and of recomputation set some.
            for name in of_cells - bookkeeping.keys() - _names_set(type(cell).__call__):
                self._hold(".".join(filter(None, ("model", path, name))), _spaces(cell), name)

    def _hold(self, label: str, spaces: Sequence[Mapping[str, Any]], name: str) -> None:
        value = _find(spaces, name)
        if isinstance(value, (*PLAIN, Tensor, np.ndarray)):
            self._values.append((label, spaces, name, value))

    def _hold_object(self, label: str, value: Any, read: Collection[str]) -> None:
        """Hold what is read of a global object, such as `current_run.update`; of a property that
        has its name, the attribute with an underscore before it.
        """
        if isinstance(value, (type, types.ModuleType, types.FunctionType, nn.Cell, Tensor)):
            return
        space: dict[str, Any] = getattr(value, "__dict__", {})
        for name in space:
            if name.lstrip("_") in read:
                self._hold(f"{label}.{name.lstrip('_')}", [space], name)

    def check(self) -> None:
        """Raise `JobError` if a value has changed, of which compiled code would see nothing."""
        for label, spaces, name, before in self._values:
            now = _find(spaces, name)
            plain = isinstance(before, PLAIN) and isinstance(now, PLAIN)
            if now is not before and not (plain and repr(now) == repr(before)):
                change = f" from {before!r} to {now!r}" if plain else ""
                raise JobError(
                    f"{label} changed{change} after loss() was compiled with it as a constant: "
                    "hold it in a Parameter and use ops.assign, or set engine.mode=pynative"
                )


def _names_read(function: Any, owner: type, functions: list[types.FunctionType]) -> set[str]:
    """Return the names of attributes and globals in a method of `owner`, and in what it calls by
    them outside of MindSpore; these functions are added to `functions`.
    """
    function = inspect.unwrap(function) if callable(function) else function
    if not isinstance(function, types.FunctionType) or function in functions:
        return set()
    if function.__module__.startswith("mindspore."):
        return set(function.__code__.co_names) - _names_set(function)
    functions.append(function)
    names = set(function.__code__.co_names)
    for name in list(names):
        called = (vars(value).get(name) for value in owner.__mro__)
        for value in (*called, function.__globals__.get(name)):
            names |= _names_read(value, owner, functions)
    return names


def _names_set(function: Any) -> set[str]:
    steps = dis.get_instructions(function)
    return {step.argval for step in steps if step.opname == "STORE_ATTR"}


def _spaces(owner: Any) -> list[Mapping[str, Any]]:
    return [vars(part) for part in (owner, *type(owner).__mro__) if hasattr(part, "__dict__")]


def _find(spaces: Sequence[Mapping[str, Any]], name: str) -> Any:
    """Return a value without calling properties; a class if there is none."""
    return next((space[name] for space in spaces if name in space), Constants)
