"""One way to compile, for all modes, with the time of first calls kept apart.

`engine.mode`: "pynative" leaves functions as they are, "jit" compiles them, "graph" compiles them
with the framework in graph mode globally.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import Tensor

from orchestrator.errors import JobError

CUT = 1200
OWN_WORDS = ("The Function Call Stack", "C++ Call Stack")


def explained(error: Exception, what: str) -> str:
    """The compiler's message, cut to what a user can act on: its first part and the user's
    lines.
    """
    text = str(error)
    for word in OWN_WORDS:
        head, _, rest = text.partition(word)
        trace = rest.partition("The Traceback of Net Construct Code")[2]
        text = head + trace
    lines = [
        line
        for line in text.splitlines()
        if line.strip() and not set(line.strip()) <= {"-", "#", ":"} and line.strip() != "- The"
    ]
    return f"{what} does not compile: " + "\n".join(lines)[:CUT]


class Compiled:
    """A function, compiled once for each set of shapes that it meets.

    Args:
        function: takes and gives tensors only.
        mode: "pynative", "jit" or "graph".
        jit_level: "O0", "O1" or "O2"; None for the framework's default.
        what: how messages call the function.
    """

    def __init__(
        self, function: Callable[..., Any], *, mode: str, jit_level: str | None, what: str
    ) -> None:
        self._what, self._mode = what, mode
        self._met: set[Any] = set()
        self.compile_s = 0.0
        if mode == "pynative":
            self._call = function
        else:
            options: dict[str, Any] = {"jit_level": jit_level} if jit_level else {}
            self._call = ms.jit(function, **options)

    def __call__(self, *tensors: Tensor) -> Any:
        met = tuple((tensor.shape, str(tensor.dtype)) for tensor in tensors)
        if met in self._met or self._mode == "pynative":
            return self._call(*tensors)
        began = time.perf_counter()
        try:
            result = self._call(*tensors)
        except (
            RuntimeError,
            TypeError,
            ValueError,
            NameError,
            AttributeError,
            SyntaxError,
        ) as error:
            raise JobError(
                explained(error, self._what) + "\nwithout compilation it may work: try "
                "engine.mode=pynative"
            ) from error
        self._met.add(met)
        self.compile_s += time.perf_counter() - began
        return result
