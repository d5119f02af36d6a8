"""Recorded speeds: `accumulation.balance=RUN` deals work by the speeds that RUN has recorded.

A run with `balance=measured` in fast mode repeats its bits only where its division is repeated, and
that follows from the measured speeds. They are in its metrics.jsonl.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from orchestrator.config.schema import ClusterConfig, Config, node_range
from orchestrator.errors import (
    ConfigError,
    RunFolderError,
    UsageError,
    did_you_mean,
    expand_user,
    shortened,
)
from orchestrator.rundir.files import read_json, write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import read_metrics
from orchestrator.units import plural

BALANCE = "accumulation.balance"
BALANCES = ("even", "measured")

SpeedChanges = list[tuple[int, tuple[float, ...]]]
"""(update, the ranks' speeds from it on, to a mean of 1), by update."""


def speeds_at(changes: SpeedChanges, update: int) -> tuple[float, ...] | None:
    """Return the speeds for an update; None where all are equal.

    >>> changes = [(0, (1.0, 1.0)), (9, (1.5, 0.5))]
    >>> speeds_at(changes, 8), speeds_at(changes, 9)
    (None, (1.5, 0.5))
    """
    place = bisect_right(changes, update, key=itemgetter(0))
    speeds = changes[place - 1][1] if place else (1.0,)
    return speeds if min(speeds) < max(speeds) else None


def names_run(balance: str) -> bool:
    """Return whether a value of `accumulation.balance` is the folder of a run."""
    return balance not in BALANCES


def recorded_speeds(run: str) -> SpeedChanges:
    """Return the speeds that a run has recorded. Later updates keep the last ones.

    Raises:
        ConfigError: there is no such run, or it has recorded none.
    """
    try:
        folder = RunDir(expand_user(run)).existing()
        updates = read_metrics(folder.metrics).updates
    except UsageError as error:
        meant = did_you_mean(run, BALANCES).partition("; known are: ")[0]
        raise ConfigError(
            f"{BALANCE} must be {', '.join(BALANCES)} or the folder of a run that has measured "
            f"speeds, but is {run}: {error}{meant}"
        ) from error
    changes: SpeedChanges = []
    for line in updates:
        speeds: Any = line.get("speeds", ())
        if not isinstance(speeds, (list, tuple)) or not all(map(_is_speed, speeds)):
            raise ConfigError(
                f"{BALANCE}={run}: {folder.metrics} is damaged: the speeds of update "
                f"{line['update']} are {shortened(repr(speeds))}"
            )
        if speeds:
            changes.append((line["update"], tuple(speeds)))
    if not changes:
        raise ConfigError(
            f"{BALANCE}={run}: that run has recorded no speeds; only runs with {BALANCE}=measured "
            f"on two ranks or more do. Try {BALANCE}=measured"
        )
    return changes


def _is_speed(value: Any) -> bool:
    return isinstance(value, float) and 0 < value < math.inf


def speeds_for(balance: str, ranks: Sequence[int]) -> SpeedChanges:
    """Return the recorded speeds that a new run is to use; none where it uses none.

    Args:
        ranks: the numbers of ranks that it may have.

    Raises:
        ConfigError: there are none, or they are of another number of ranks.
    """
    if not names_run(balance):
        return []
    changes = recorded_speeds(balance)
    _refuse_other_ranks(balance, changes, ranks)
    return changes


def possible_ranks(cluster: ClusterConfig) -> list[int]:
    """Return the numbers of ranks that a run may have."""
    least, most = node_range(cluster.nodes)
    return [nodes * cluster.ranks_per_node for nodes in range(least, most + 1)]


def _refuse_other_ranks(balance: str, changes: SpeedChanges, ranks: Sequence[int]) -> None:
    counts = sorted({len(speeds) for _, speeds in changes})
    if len(counts) > 1:
        raise ConfigError(
            f"{BALANCE}={balance}: its speeds are of {' and '.join(map(str, counts))} ranks, since "
            f"it lost or got some while it ran, which cannot be repeated; try {BALANCE}=measured"
        )
    if counts[0] not in ranks:
        raise ConfigError(
            f"{BALANCE}={balance}: its speeds are of {plural(counts[0], 'rank')}, but this run has "
            f"{plural(max(ranks), 'rank')}; start it on {counts[0]}, or with {BALANCE}=measured"
        )


def keep_speeds(config: Config, run: RunDir) -> None:
    """Copy the recorded speeds that a run uses into its folder, so that it is whole without the
    other. Raises `ConfigError` as `speeds_for`.
    """
    balance = config.accumulation.balance
    if changes := speeds_for(balance, possible_ranks(config.cluster)):
        write_json(run.speeds, {"run": balance, "speeds": changes})


def kept_speeds(config: Config, run: RunDir) -> SpeedChanges:
    """Return a run's copy of the recorded speeds that it uses; none where it uses none.

    Raises:
        RunFolderError: it is not there.
        ConfigError: the run has another number of ranks now.
    """
    balance = config.accumulation.balance
    if not names_run(balance):
        return []
    copy = read_json(run.speeds)
    if copy is None:
        raise RunFolderError(f"{run.speeds} was removed: the speeds that this run repeats")
    changes = [(update, tuple(speeds)) for update, speeds in copy["speeds"]]
    _refuse_other_ranks(balance, changes, possible_ranks(config.cluster))
    return changes
