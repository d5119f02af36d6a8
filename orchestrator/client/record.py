"""Record of a program's rank 0: figures as they are when reported, lines written by a thread."""

from __future__ import annotations

import atexit
import contextlib
import json
import operator
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.errors import JobError, OrchestratorError, shortened
from orchestrator.rundir.files import LineFile

FLUSH_S = 5.0
MOST_FIGURES = 100  # with the names below a line stays within what a glance at the file reads
LONGEST_NAME = 100
Line = dict[str, Any]
Figure = float | Callable[[], float] | None


def whole_number(
    call: str,
    name: str,
    value: Any,
    least: int = 0,
    error: type[OrchestratorError] = JobError,
) -> int:
    """Return an argument of `run.<call>()` as an int, at least `least`. Raises `error` if it is
    anything else.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        hint = f" (len({name}) perhaps)" if hasattr(value, "__len__") else ""
        raise error(
            f"run.{call}(): {name} must be a whole number, {least} or more, but is "
            f"{value!r:.60}{hint}"
        )
    return number


def figures(call: str, given: Mapping[str, Any]) -> dict[str, Figure]:
    """Return each figure as it is now, whether or not a tensor changes afterwards.

    One on a device is copied there, and becomes a number when the returned function is called.

    Raises:
        JobError: a value is no number, or there are too many for a line.
    """
    if len(given) > MOST_FIGURES or any(len(name) > LONGEST_NAME for name in given):
        raise JobError(
            f"{call} takes at most {MOST_FIGURES} figures, with names of at most {LONGEST_NAME} "
            f"characters; it is a line that people read"
        )
    return {name: _figure(call, name, value) for name, value in given.items()}


def _figure(call: str, name: str, value: Any) -> Figure:
    if type(value) is float or value is None:
        return value
    if hasattr(value, "detach") and value.numel() == 1:  # a tensor of torch's
        value = value.detach()
        if value.device.type not in ("cpu", "meta"):
            return _deferred_number(value)
    if not isinstance(value, str | bytes):  # of which float() would take some
        with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
            return float(value)
    raise JobError(
        f"{call} takes numbers, and tensors that hold one, but {name} is "
        f"{shortened(' '.join(repr(value).split()), 40)} "
        f"({type(value).__name__}); try its mean()"
    )


def _deferred_number(value: Any) -> Callable[[], float]:
    """Copy a number on its device, in the order of this thread's work there; return its reader."""
    copy = value.clone()
    copied = sys.modules["torch"].Event(copy.device)
    copied.record()

    def number() -> float:
        copied.synchronize()
        return float(copy)

    return number


class Lines:
    """Writer of metrics.jsonl in a thread: recording a line never waits for the disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: queue.SimpleQueue[Line | threading.Event | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="report", daemon=True)
        self._warned = set[str]()
        self._writer.start()
        atexit.register(self.close)

    def put(self, record: Line) -> None:
        self._lines.put(record)

    def flush(self) -> None:
        """Wait until all earlier lines are written, so that no checkpoint is ahead of them."""
        written = threading.Event()
        self._lines.put(written)
        written.wait(FLUSH_S)

    def close(self) -> None:
        self._lines.put(None)
        self._writer.join(FLUSH_S)

    def _write(self) -> None:
        file = LineFile(self._path)
        while (record := self._lines.get()) is not None:
            if isinstance(record, threading.Event):
                record.set()
                continue
            try:
                file.write(json.dumps(self._plain(record)))
            except OSError as error:  # the lines are kept, and follow as soon as there is room
                self._warn(f"metrics.jsonl could not be written: {error.strerror}")
        with contextlib.suppress(OSError):  # reported above
            file.close()

    def _plain(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: self._plain(inner) for name, inner in value.items()}
        if not callable(value):
            return value
        try:
            return value()
        except RuntimeError as error:  # the device's, which the training meets as well
            self._warn(f"a figure could not be read: {error}")
            return None

    def _warn(self, sentence: str) -> None:
        if sentence not in self._warned:
            self._warned.add(sentence)
            with contextlib.suppress(OSError):  # its log may lie on the same full disk
                print(f"warning: {sentence}", file=sys.stderr, flush=True)
