"""`accumulation.balance=measured`: work is dealt by the speeds that ranks were seen to have.

Every few updates the ranks exchange how long they worked, and on how much. All of them derive the
same speeds from that. New ones apply some updates later, so that loaders which read ahead know in
time, and only where the busiest rank would gain by them. No update changes: any division is the
same big batch, and in reproducible mode it has the same bits.

Speeds are saved with checkpoints, so that a restart begins with them where a rank is on the same
node; survivors of a loss keep theirs.
"""

from __future__ import annotations

import os
import socket
import zlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Protocol

from orchestrator.errors import JobError
from orchestrator.plan.recorded_speeds import BALANCE, SpeedChanges, speeds_at
from orchestrator.rundir.warnings import warn

INTERVAL = 4
"""Updates between two exchanges."""

WORTH = 1.05
"""The busiest rank's time to the mean from which on new speeds apply."""

JUMP = 1.25
"""A rank's speed to that of the exchange before from which on it has changed; what is less may be
noise, and the mean of both counts.
"""

SLOWEST = 1 / 64
"""The least speed of a rank, to the mean: it keeps some work, so that it can be seen to recover."""

SLOW, PERSISTENT = 0.8, 4
"""A rank below this speed, to the mean, in so many exchanges in a row is warned of."""

PROBE = 1.5
"""Growth of the speed of a rank that had no work, until it has some to be measured by."""

SPARE_WINDOWS = 4
"""Windows that are asked for beyond those of a loader's workers: ones without work for a rank."""

Gather = Callable[[Sequence[float]], list[list[float]]]
"""Every rank's numbers, a row for each rank; collective."""

SpeedRows = list[list[float]]
"""Of each rank of a group: its speed, and the digest of its node's name."""


class Speeds(Protocol):
    """Speeds of the ranks of a group by update, the same on all ranks."""

    def at(self, update: int) -> tuple[float, ...] | None:
        """Return the speeds for an update; None while all are equal."""

    def began_at(self, update: int) -> tuple[float, ...] | None:
        """Return the speeds that apply from this update on; None if there is no change."""

    def add(self, update: int, *, seconds: float, cost: float) -> None:
        """Add this rank's work of an update. Perhaps collective."""


@dataclass(frozen=True, slots=True)
class RecordedSpeeds:
    """Speeds that another run has recorded; see `recorded_speeds`."""

    changes: SpeedChanges

    def at(self, update: int) -> tuple[float, ...] | None:
        return speeds_at(self.changes, update)

    def began_at(self, update: int) -> tuple[float, ...] | None:
        place = bisect_left(self.changes, update, key=itemgetter(0))
        return dict(self.changes[place : place + 1]).get(update)

    def add(self, update: int, *, seconds: float, cost: float) -> None:
        """Measure nothing."""


@dataclass(slots=True)
class MeasuredSpeeds:
    """Speeds of the ranks of a group, the same on all of them.

    Attributes:
        rank: this one.
        first: update that the group begins with.
        ahead: windows that loaders ask for before it is their turn.
        gather: collective.
        changes: (update, speeds), to a mean of 1, that apply from the update on; only those that
            the present window and later ones need.
        rows: each rank's newest speed and the digest of its node's name, for checkpoints. The list
            stays the same object.
        setting: that asks for it, as a user spells it.
    """

    rank: int
    first: int
    ahead: int
    gather: Gather
    changes: SpeedChanges = field(default_factory=list)
    rows: SpeedRows = field(default_factory=list)
    setting: str = f"{BALANCE}=measured"
    _latest: tuple[float, ...] | None = None
    _known: int = 0
    _slow: int = 0
    _seconds: float = 0.0
    _cost: float = 0.0

    def __post_init__(self) -> None:
        self._known = self.first + INTERVAL + self.ahead

    @classmethod
    def begin(
        cls, rank: int, first: int, ahead: int, gather: Gather, *, known: float | None
    ) -> MeasuredSpeeds:
        """Return the speeds of a new group, from those that ranks know of themselves. Collective.

        Args:
            known: this rank's, from an earlier group; None: it has none.
        """
        rows = gather([known or 0.0, node_digest()])
        speeds = completed(rows)
        nodes = [node for _, node in rows]
        rows = [list(row) for row in zip(speeds, nodes, strict=True)]
        return cls(rank, first, ahead, gather, [(first, speeds)], rows)

    @property
    def own(self) -> float | None:
        """Return this rank's newest speed; None if it is not known."""
        return self.rows[self.rank][0] if self.rows else None

    def at(self, update: int) -> tuple[float, ...] | None:
        """Return the speeds for an update; None while all count as equal.

        Raises:
            JobError: nobody knows yet, since a loader reads too far ahead.
        """
        if update >= self._known:
            raise JobError(
                f"the samples of update {update} were asked for before update "
                f"{self._known - self.ahead} was done, but who computes them depends on how fast "
                f"ranks are until then ({self.setting}, {self.ahead} updates ahead): let loaders "
                "read less ahead (fewer workers, or a smaller prefetch_factor), or use balance=even"
            )
        return speeds_at(self.changes, update)

    def began_at(self, update: int) -> tuple[float, ...] | None:
        """Return the speeds that apply from this update on; None if there is no change."""
        return next((speeds for first, speeds in self.changes if first == update), None)

    def add(self, update: int, *, seconds: float, cost: float) -> None:
        """Add this rank's work of an update; exchange it where that is due, which is collective."""
        if cost > 0:
            self._seconds += max(seconds, 0.0)
            self._cost += cost
        done = update + 1
        if (done - self.first) % INTERVAL:
            return
        rows = self.gather([self._seconds, self._cost])
        self._seconds = self._cost = 0.0
        self._known = done + INTERVAL + self.ahead
        before = self.at(done + self.ahead) or (1.0,) * len(rows)
        latest = speeds_of(rows, before)
        speeds = smoothed(latest, self._latest or latest)
        self._latest = latest
        times = [old / new for old, new in zip(before, speeds, strict=True)]
        self._slow = self._slow + 1 if speeds[self.rank] < SLOW else 0
        if self._slow == PERSISTENT:
            warn(
                f"it works at {speeds[self.rank]:.2f} of the ranks' mean speed, and is given less "
                f"to do ({self.setting}); its node, {node_name()}, may be throttled or shared",
                kind="a slow rank",
                about="rank",
            )
        if max(times) > WORTH * sum(before) / sum(speeds):
            self.changes.append((done + self.ahead, speeds))
            for row, speed in zip(self.rows, speeds, strict=False):
                row[0] = speed
        # Windows before this one are not asked for any more; a run may have a million of them.
        while len(self.changes) > 1 and self.changes[1][0] <= update:
            del self.changes[0]


def node_name() -> str:
    """Return the name of this rank's node."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def node_digest() -> float:
    """Return a digest of the node's name, as a number that ranks can exchange, also as float32."""
    return float(zlib.crc32(node_name().encode()) % 2**24)


def known_speed(rows: Sequence[Sequence[float]], rank: int) -> float | None:
    """Return the speed of a rank of this node by the rows of an earlier group: the rank's own, else
    the mean of its node; None if the node had no rank.
    """
    node = node_digest()
    if rank < len(rows) and rows[rank][1] == node:
        return rows[rank][0]
    of_node = [speed for speed, other in rows if other == node]
    return sum(of_node) / len(of_node) if of_node else None


def completed(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the ranks' speeds, to a mean of 1: unknown ones are the mean of their node, else the
    mean of all that are known.

    Args:
        rows: each rank's speed, 0 if it is not known, and its node.

    >>> completed([[0.8, 7], [0.4, 8], [0.0, 8], [0.0, 9]])
    (1.4545454545454546, 0.7272727272727273, 0.7272727272727273, 1.090909090909091)
    """
    of_nodes: dict[float, list[float]] = {}
    for speed, node in rows:
        if speed > 0:
            of_nodes.setdefault(node, []).append(speed)
    means = {node: sum(speeds) / len(speeds) for node, speeds in of_nodes.items()}
    known = [speed for speed, _ in rows if speed > 0] or [1.0]
    typical = sum(known) / len(known)
    speeds = [speed if speed > 0 else means.get(node, typical) for speed, node in rows]
    mean = sum(speeds) / len(speeds)
    return tuple(speed / mean for speed in speeds)


def speeds_of(rows: Sequence[Sequence[float]], before: Sequence[float]) -> tuple[float, ...]:
    """Return the ranks' speeds, to a mean of 1.

    Args:
        rows: each rank's seconds and the cost of what it computed in them.
        before: speeds to a mean of 1, which those without work are derived from.

    >>> speeds_of([[1.0, 4.0], [2.0, 4.0]], [1.0, 1.0])
    (1.3333333333333333, 0.6666666666666666)
    """
    measured = [cost / seconds if seconds > 0 and cost > 0 else None for seconds, cost in rows]
    seen = [(speed, old) for speed, old in zip(measured, before, strict=True) if speed is not None]
    if not seen:
        return tuple(before)
    unit = sum(speed for speed, _ in seen) / sum(old for _, old in seen)
    speeds = [
        min(1.0, PROBE * old) * unit if speed is None else speed
        for speed, old in zip(measured, before, strict=True)
    ]
    least = SLOWEST * sum(speeds) / len(speeds)
    speeds = [max(speed, least) for speed in speeds]
    mean = sum(speeds) / len(speeds)
    return tuple(speed / mean for speed in speeds)


def smoothed(latest: Sequence[float], before: Sequence[float]) -> tuple[float, ...]:
    """Return the ranks' speeds without the noise of two exchanges.

    >>> smoothed([1.0, 1.0], [1.1, 0.5])
    (1.05, 1.0)
    """
    return tuple(
        (new + old) / 2 if max(new, old) < JUMP * min(new, old) else new
        for new, old in zip(latest, before, strict=True)
    )
