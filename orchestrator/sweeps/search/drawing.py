"""Which point a trial is: a function of the seed, its number and what came of the trials before it.

So a search that was killed draws what it would have drawn. Optuna chooses, on a copy of the history
in memory, and nothing is written down before a choice is whole.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.compose.search_space import Axis, Space
from orchestrator.config.schema import SweepConfig
from orchestrator.errors import ConfigError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

OLDEST = 4
NOT_INSTALLED = (
    "a search draws with optuna, which is not installed; pip install 'cluster-orchestrator[search]'"
)


def refuse_without_optuna() -> None:
    """Raise `ConfigError` where optuna is missing, or is one that this cannot use."""
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError(NOT_INSTALLED)
    import optuna

    if int(optuna.__version__.partition(".")[0]) < OLDEST:
        raise ConfigError(
            f"a search draws with optuna {OLDEST} or later, but {optuna.__version__} is installed; "
            f"hydra-optuna-sweeper, which wants optuna<3, needs an environment of its own"
        )
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def draw(space: Space, sweep: SweepConfig, history: Sequence[FrozenTrial]) -> dict[str, Any]:
    """A value for each axis, by its key, for the trial that comes after these.

    Args:
        history: all trials so far by their numbers, also those that run.
    """
    number = len(history)
    if sweep.search == "grid":
        return space.of_grid(number)
    import optuna

    study = optuna.create_study(
        direction="maximize" if sweep.direction == "maximize" else "minimize",
        sampler=_sampler(sweep.search, seed_of(sweep.seed, number)),
    )
    study.add_trials(history)
    return dict(study.ask(distributions(space)).params)


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """The space in Optuna's words."""
    return {axis.key: _distribution(axis) for axis in space.axes}


def _distribution(axis: Axis) -> BaseDistribution:
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    if axis.ordered:
        return IntDistribution(0, len(axis.texts) - 1)
    if axis.texts:
        return CategoricalDistribution(axis.texts)
    if axis.whole:
        return IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return FloatDistribution(axis.low, axis.high, log=axis.log)


def _sampler(name: str, seed: int) -> BaseSampler:
    """As it is at one trial: all it remembers of others is in the history."""
    from optuna.samplers import RandomSampler, TPESampler

    if name == "random":
        return RandomSampler(seed=seed)
    return TPESampler(seed=seed, constant_liar=True)  # keeps away from what runs at the moment


def seed_of(seed: int, number: int) -> int:
    """Of one trial. Neighbouring searches share none, as adding the two would have it.

    >>> seed_of(0, 1) != seed_of(1, 0)
    True
    """
    digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
