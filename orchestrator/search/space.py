"""Search space of a sweep, from Hydra's sweep syntax."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep, Sweep
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
)
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import FrozenTrial

from orchestrator.config.schema import SweepConfig
from orchestrator.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One key that is chosen.

    Attributes:
        key: as overrides have it, with what says how it is applied.
        distribution: of the values that are drawn.
        texts: all there is to choose from, as values of overrides; () for an interval. Of those
            that have an order the number is drawn.
    """

    key: str
    distribution: BaseDistribution
    texts: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The key as people write it."""
        return self.key.lstrip("+")

    def text(self, value: Any) -> str:
        """Return a drawn value as an override.

        >>> Axis(key="+a", texts=("1", "3"), distribution=IntDistribution(0, 1)).text(1)
        '+a=3'
        """
        if isinstance(self.distribution, CategoricalDistribution):
            return f"{self.key}={value}"
        if self.texts:
            return f"{self.key}={self.texts[value]}"
        whole = isinstance(self.distribution, IntDistribution)
        return f"{self.key}={int(value) if whole else float(value)!r}"

    @property
    def samples(self) -> list[Any]:
        """Values as they might be drawn: every alternative, or one inside of an interval."""
        drawn: Any = self.distribution
        if isinstance(drawn, CategoricalDistribution):
            return list(drawn.choices)
        if isinstance(drawn, IntDistribution):
            return [drawn.low, drawn.high] if self.texts else [drawn.high]
        return [(drawn.low + drawn.high) / 2]

    def to_json(self) -> dict[str, Any]:
        """Return plain values, to be compared with those of another start."""
        return {"of": list(self.texts), "drawn": distribution_to_json(self.distribution)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """The axes of a search, and the overrides that all of its trials share."""

    axes: tuple[Axis, ...]
    fixed: tuple[str, ...]

    def overrides(self, drawn: Mapping[str, Any]) -> list[str]:
        """Return the overrides of a trial; `drawn`: a value for each axis, by its key."""
        return [*self.fixed, *(axis.text(drawn[axis.key]) for axis in self.axes)]

    def grid_size(self, trials: int | None) -> int:
        """Return the number of trials of a grid. Raises `ConfigError` if it has not as many."""
        if endless := [axis.name for axis in self.axes if not axis.texts]:
            raise ConfigError(
                f"sweep.search=grid tries all points, and {endless[0]} has them without end; give "
                f"it values (a,b or range(…)), or use sweep.search=tpe"
            )
        size = math.prod(len(axis.texts) for axis in self.axes)
        if (trials or 0) > size:
            raise ConfigError(
                f"sweep.trials={trials}, but the grid has {size} points; leave it out"
            )
        return trials or size

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        return {axis.key: axis.distribution for axis in self.axes}

    def draw(self, sweep: SweepConfig, history: Sequence[FrozenTrial]) -> dict[str, Any]:
        """Choose a value for each axis, by its key, for the next trial.

        It depends on nothing but the arguments, so that a search that was killed continues with
        the trials of an uninterrupted one.

        Args:
            history: all trials so far by their numbers, running ones included.
        """
        number = len(history)
        if sweep.search == "grid":
            return self.grid_point(number)
        # Hashed, so that neighbouring seeds share no trial, as they would if they were added.
        digest = hashlib.sha256(f"{sweep.seed} {number}".encode()).digest()
        seed = int.from_bytes(digest[:4], "big")
        study = optuna.create_study(
            direction="maximize" if sweep.direction == "maximize" else "minimize",
            sampler=RandomSampler(seed=seed)
            if sweep.search == "random"
            else TPESampler(seed=seed, constant_liar=True),  # avoids points that run now
        )
        study.add_trials(history)
        return dict(study.ask(self.distributions).params)

    def grid_point(self, number: int) -> dict[str, Any]:
        """Return one of all points, in the order of a sweep: the last axis changes fastest.

        >>> x, y = (CategoricalDistribution(values) for values in ("ab", "123"))
        >>> axes = [Axis(key=k, texts=d.choices, distribution=d) for k, d in (("x", x), ("y", y))]
        >>> Space(axes=tuple(axes), fixed=()).grid_point(4)
        {'x': 'b', 'y': '2'}
        """
        drawn: dict[str, Any] = {}
        for axis in reversed(self.axes):
            number, index = divmod(number, len(axis.texts))
            ordered = isinstance(axis.distribution, IntDistribution)
            drawn[axis.key] = index if ordered else axis.texts[index]
        return {axis.key: drawn[axis.key] for axis in self.axes}


def space_of(parsed: Sequence[Override]) -> Space:
    """Return the space that overrides describe. Raises `ConfigError` if it cannot be drawn from."""
    wrong: list[str] = []
    axes: list[Axis] = []
    swept = [override for override in parsed if override.is_sweep_override()]
    for override in swept:
        try:
            axes.append(_axis(override))
        except ConfigError as error:
            wrong.append(f"{override.input_line} {error}")
    names = [override.get_key_element().lstrip("+") for override in parsed]
    chosen = dict.fromkeys(axis.name for axis in axes)
    wrong += [f"{n} is stated twice; leave one out" for n in chosen if names.count(n) > 1]
    if not swept:
        wrong.append(
            "a search has nothing to choose: write what may be chosen, as in "
            "schedule.base_lr='interval(0.001,0.1)' or accumulation.steps=1,2,4"
        )
    if wrong:
        raise ConfigError("\n".join(wrong))
    fixed = tuple(str(o.input_line) for o in parsed if not o.is_sweep_override())
    return Space(axes=tuple(axes), fixed=fixed)


def _axis(override: Override) -> Axis:
    value = override.value()
    if override.is_delete() or (not isinstance(value, Sweep) and not override.is_choice_sweep()):
        raise ConfigError("cannot be drawn: it takes a key away")
    tags: set[str] = value.tags if isinstance(value, Sweep) else set()
    if unknown := sorted(tags - {"log"}):
        raise ConfigError(f"has the tag {unknown[0]}, which means nothing here; known is: log")
    if getattr(value, "shuffle", False):
        raise ConfigError("cannot be shuffled: a search has an order of its own")
    key = override.get_key_element()
    if override.key_or_group.partition(".")[0] == "run":
        raise ConfigError("cannot be chosen: it tells no trial from another")
    if isinstance(value, IntervalSweep):
        return _interval(key, value)
    if tags:
        raise ConfigError("cannot be drawn by logarithms: that is for interval(…) alone")
    try:
        texts = tuple(dict.fromkeys(override.sweep_string_iterator()))
    except ValueError as error:
        raise ConfigError(f"cannot be drawn: {error}") from error
    if not texts:
        raise ConfigError("has no value to choose")
    if isinstance(value, RangeSweep):
        return Axis(key=key, texts=texts, distribution=IntDistribution(0, len(texts) - 1))
    return Axis(key=key, texts=texts, distribution=CategoricalDistribution(texts))


def _interval(key: str, value: IntervalSweep) -> Axis:
    low, high = value.start, value.end
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        raise ConfigError("cannot be drawn: both ends of an interval are finite numbers")
    log = "log" in value.tags
    if low == high:
        raise ConfigError(f"cannot be drawn: its lower end and its upper end are both {low:g}")
    if low > high:
        raise ConfigError(
            f"cannot be drawn: its lower end, {low:g}, is above its upper end, {high:g}; the "
            f"lower one comes first, as in interval({high:g},{low:g})"
        )
    if log and low <= 0:
        raise ConfigError(f"cannot be drawn by logarithms: {low} is not above 0")
    if isinstance(low, int) and isinstance(high, int):
        return Axis(key=key, distribution=IntDistribution(low, high, log=log))
    return Axis(key=key, distribution=FloatDistribution(low, high, log=log))
