"""Names of attributes and globals that functions read."""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Mapping
from typing import Any

LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")


class CodeReads:
    """Names that functions, and those that they call, read, as far as their bytecode shows.

    Args:
        framework: the name of a package, whose functions are not followed.

    Attributes:
        globals: namespaces and names of module globals.
    """

    def __init__(self, framework: str) -> None:
        self.globals: dict[str, tuple[Mapping[str, Any], str]] = {}
        self._framework = f"{framework}."
        self._loaded: set[str] = set()
        self._stored: set[str] = set()
        self._seen: set[Any] = set()

    @property
    def attributes(self) -> set[str]:
        """Names of attributes, of any object, but for those that the functions also set."""
        return self._loaded - self._stored

    def add(self, function: Any, owner: type = object) -> None:
        """Add what a function, a method of `owner`, reads."""
        function = inspect.unwrap(function) if callable(function) else function
        if isinstance(function, types.FunctionType) and function.__code__ not in self._seen:
            self._seen.add(function.__code__)
            self._add_code(function.__code__, function, owner)

    def _add_code(self, code: types.CodeType, function: types.FunctionType, owner: type) -> None:
        outside = not function.__module__.startswith(self._framework)
        for instruction in dis.get_instructions(code):
            name = instruction.argval
            if instruction.opname == "STORE_ATTR":
                self._stored.add(name)
            elif instruction.opname in LOADS:
                self._loaded.add(name)
                for one in owner.__mro__ if outside else ():
                    self.add(vars(one).get(name), owner)
            elif instruction.opname == "LOAD_GLOBAL" and outside:
                self.globals[f"{function.__module__}.{name}"] = function.__globals__, name
                self.add(function.__globals__.get(name))
            elif isinstance(name, types.CodeType):  # of a comprehension, or an inner function
                self._add_code(name, function, owner)
