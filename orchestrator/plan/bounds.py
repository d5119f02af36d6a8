"""The two checks that the modules here make of a value, in the words of the configuration.

Not a validator of configurations, which are checked before a plan is made: these keep values that
were made by hand from meaning something else.
"""

from __future__ import annotations

from orchestrator.config.schema import CHOICES
from orchestrator.errors import PlanError, nearest


def at_least(minimum: int, key: str, value: int) -> int:
    """Give `value` back if it is `minimum` or more.

    >>> at_least(1, "accumulation.steps", 4)
    4

    Raises:
        PlanError: it is less; the message names `key` as people spell it.
    """
    if value < minimum:
        raise PlanError(
            f"{key}={value}: it must be {minimum} or more; the nearest that works is "
            f"{key}={minimum}"
        )
    return value


def one_of(key: str, value: str) -> str:
    """Give `value` back if it is one of the schema's choices for `key`.

    >>> one_of("accumulation.ragged", "drop")
    'drop'

    Raises:
        PlanError: it is not; the message gives the nearest spelling, or all choices.
    """
    choices = CHOICES[key]
    if value not in choices:
        meant = nearest(value, choices)
        hint = f"; did you mean {key}={meant}?" if meant is not None else ""
        raise PlanError(f"{key}={value}: it must be one of {', '.join(choices)}{hint}")
    return value
