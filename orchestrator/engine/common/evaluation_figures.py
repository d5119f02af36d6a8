"""What a job's `evaluate()` gives: held-out figures by name. No framework is imported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from orchestrator.errors import JobError
from orchestrator.rundir.warnings import warn


def checked_figures(found: Any, job: Any) -> dict[str, float]:
    """`found`, which `job.evaluate()` returned, as numbers by name; NaN and infinity are warned of.

    >>> from types import SimpleNamespace
    >>> checked_figures({"accuracy": 1}, SimpleNamespace())
    {'accuracy': 1.0}

    Raises:
        JobError: it is no dictionary, or a value is not one number.
    """
    named = f"{type(job).__name__}.evaluate()"
    if not isinstance(found, Mapping):
        told = "nothing" if found is None else f"a {type(found).__name__}"
        raise JobError(
            f"{named} must return figures by name, as in return {{'accuracy': 0.9}}, but returned "
            f"{told}; leave evaluate() out where there is nothing to say"
        )
    figures = {str(name): _number(value, f"{named}'s '{name}'") for name, value in found.items()}
    for name, value in figures.items():
        if not math.isfinite(value):
            warn(
                f"{named}'s '{name}' is {value}: of a model that diverged, or of a mistake in it",
                kind=f"evaluate {name}",
            )
    return figures


def _number(value: Any, what: str) -> float:
    """A number, or a tensor or array of one. Raises `JobError`."""
    shape = tuple(getattr(value, "shape", ()))
    one = math.prod(shape) == 1
    try:
        if one and not isinstance(value, str | bytes):
            item: Any = getattr(value, "item", lambda: value)
            return float(item())
    except (TypeError, ValueError, RuntimeError):
        pass  # what it is instead, is said below
    told = f"a {type(value).__name__}" + (f" of shape {shape}" if not one else f", {value!r:.40}")
    raise JobError(f"{what} must be one number, but is {told}")
