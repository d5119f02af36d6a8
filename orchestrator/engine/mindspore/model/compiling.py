"""One way to compile, for all modes, with the time of first calls kept apart.

`engine.mode`: "pynative" leaves functions as they are, "jit" compiles them, "graph" compiles them
with the framework in graph mode globally.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore
import mindspore as ms
from mindspore import Tensor

from orchestrator.errors import JobError

CUT = 1200
STDERR = 2
CALL_STACKS = ("- The Function Call Stack", "- C++ Call Stack")
TRACE = "The Traceback of Net Construct Code:"
NOT_THE_USERS = (str(Path(mindspore.__file__).parent), str(Path(__file__).parent.parent))


def explained(error: Exception, what: str, printed: str = "") -> str:
    """The compiler's message, cut to its first part and the lines of the user's own code.

    Args:
        printed: what the compiler wrote to standard error: for an exception that Python raised in
            it, the lines are there and not in the message.
    """
    text = str(error)
    head, _, trace = text.partition(TRACE)
    for stack in CALL_STACKS:
        head = head.partition(stack)[0]
    said = [line for line in head.splitlines() if line.strip(" -")]
    lines = [f"{what} does not compile: " + "\n".join(said)[:CUT]]
    lines += [f"in {frame}" for frame in (_own(trace) or _own(printed))[-2:]]
    return "\n".join(lines)


def _own(trace: str) -> list[str]:
    """The frames of a compiler's trace that are neither MindSpore's nor ours."""
    frames = re.split(r"^# \d+ In file ", trace.partition("(See file")[0], flags=re.MULTILINE)[1:]
    return [frame.rstrip() for frame in frames if not frame.startswith(NOT_THE_USERS)]


def _printed() -> int | None:
    """How much was written to standard error, if it is a file, as a rank's log is."""
    found = os.fstat(STDERR)
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _printed_since(mark: int | None) -> str:
    if mark is None:
        return ""
    with Path(f"/proc/self/fd/{STDERR}").open("rb") as file:
        file.seek(mark)
        return file.read().decode("utf-8", errors="replace")


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
        began, mark = time.perf_counter(), _printed()
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
                explained(error, self._what, _printed_since(mark))
                + "\nwithout compilation it may work: try "
                "engine.mode=pynative"
            ) from error
        self._met.add(met)
        self.compile_s += time.perf_counter() - began
        return result
