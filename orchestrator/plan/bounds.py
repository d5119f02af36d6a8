"""The two checks that the modules here make of a value, with the configuration's key names.

They do not validate configurations, which are checked before a plan is made: they protect against
wrong values from other callers.
"""

from __future__ import annotations

from orchestrator.config.schema import BOUNDS
from orchestrator.errors import PlanError


def at_least(minimum: int, key: str, value: int) -> int:
    """Return `value` if it is `minimum` or more.

    >>> at_least(1, "accumulation.steps", 4)
    4

    Raises:
        PlanError: it is less; the message names `key` as users spell it.
    """
    if value < minimum:
        raise PlanError(
            f"{key}={value}: it must be {minimum} or more; the nearest that works is "
            f"{key}={minimum}"
        )
    return value


def one_of(key: str, value: str) -> str:
    """Return `value` if it is one of the schema's choices for `key`.

    >>> one_of("accumulation.ragged", "drop")
    'drop'

    Raises:
        PlanError: it is not; the message gives the nearest spelling, and all choices.
    """
    if refusal := BOUNDS[key].refusal(key, value):
        raise PlanError(refusal)
    return value
