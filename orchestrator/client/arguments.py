"""Checks of the arguments of a program's calls: whole numbers, and figures for metrics.jsonl."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping
from typing import Any

from orchestrator.errors import JobError, OrchestratorError, shortened

MOST_FIGURES = 100
"""In a line, so that `status`, which reads the end of the file, finds whole lines."""


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
        raise error(
            f"run.{call}(): {name} must be a whole number, {least} or more, but is {value!r:.60}"
        )
    return number


def figures(values: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the figures of `run.report()` as numbers; None stays.

    Raises:
        JobError: a value is no number, or there are more than `MOST_FIGURES`.
    """
    if len(values) > MOST_FIGURES:
        raise JobError(f"run.report() takes at most {MOST_FIGURES} figures, but got {len(values)}")
    return {name: None if value is None else _number(name, value) for name, value in values.items()}


def _number(name: str, value: Any) -> float:
    if not isinstance(value, str | bytes):  # of which float() would take some
        with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
            return float(value.item() if hasattr(value, "item") else value)
    raise JobError(
        f"run.report() takes numbers, and tensors that hold one, but {name} is "
        f"{shortened(' '.join(repr(value).split()), 40)} ({type(value).__name__})"
    )
