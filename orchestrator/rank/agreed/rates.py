"""A job's own learning rates: `learning_rate(update)` in the place of the configuration's schedule.

A function of the update's number and nothing else, like everything that a resumed run works out
again. It is asked twice for a few updates before training, on every rank, to see that it is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from orchestrator.config.rules import refuse_schedule
from orchestrator.config.schema import ScheduleConfig
from orchestrator.engine.api import Engine
from orchestrator.engine.common.replicas import minority_ranks
from orchestrator.errors import JobError
from orchestrator.job import has_own_rate
from orchestrator.plan.plan_warnings import named_ranks

Rates = Callable[[int], float]


def own_rates(job: Any, schedule: ScheduleConfig, engine: Engine, updates: int) -> Rates | None:
    """The job's rates, if it has its own; None for those of the schedule. Collective if it has.

    Raises:
        ConfigError: a schedule is configured as well.
        JobError: it gives no rates, or others when it is asked again, or on other ranks.
    """
    if not has_own_rate(job):
        return None
    refuse_schedule(type(job).__name__, schedule)
    named = f"{type(job).__name__}.learning_rate"

    def rates(update: int) -> float:
        return _rate(job.learning_rate(update), named, update)

    asked = sorted({0, 1 % updates, updates // 2, updates - 1})
    first = [rates(update) for update in asked]
    again = [rates(update) for update in reversed(asked)][::-1]
    for update, one, two in zip(asked, first, again, strict=True):
        if one != two:
            raise JobError(
                f"{named}({update}) gives {one:g}, then {two:g}: it must depend on the update's "
                "number alone, so that a resumed run has the rates of an undisturbed one"
            )
    rows = engine.gather(first)
    if odd := minority_ranks(rows):
        raise JobError(
            f"{named}(update) gives other rates on {named_ranks(odd)}; it must be the same on all"
        )
    return rates


def _rate(found: Any, named: str, update: int) -> float:
    try:
        rate = float(found)
    except (TypeError, ValueError, RuntimeError):
        rate = math.nan
    if not (math.isfinite(rate) and rate >= 0):
        raise JobError(f"{named}({update}) must give a number, 0 or more, but gives {found!r:.60}")
    return rate
