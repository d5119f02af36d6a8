"""Which faults, when, and to whom: drawn from a seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

PER_RUN = 4
LEAST_UPDATES = 5 * PER_RUN
"""Each fault has a part of the run of its own, in which what it breaks can be whole again."""
EARLY = 0.7  # of its part; the rest is for what follows from it

KILL_RANK, KILL_TWO, KILL_NODE = "kill a rank", "kill two ranks", "kill a node"
FREEZE_RANK, STOP, KILL_LAUNCHER = "freeze a rank", "stop, resume", "kill the launcher"
CUT, SILENCE, FILL_DISK = "cut a node's links", "silence a node", "fill the disk"
HERE = (KILL_RANK, KILL_NODE, FREEZE_RANK, STOP, KILL_TWO, KILL_LAUNCHER, CUT, SILENCE, FILL_DISK)
"""Kinds on pretended nodes."""

KILL_SCRIPT, REQUEUE = "kill the batch script", "requeue"
NOTICE = "ask to leave"
ON_SLURM = (*(kind for kind in HERE if kind != KILL_LAUNCHER), KILL_SCRIPT, REQUEUE, NOTICE)
"""On SLURM: what a user may do to a job of their own."""

LINKS = frozenset({CUT, SILENCE})
"""These need a kernel that lends a process's connections."""
ORDERLY = (STOP, REQUEUE, NOTICE)
"""These leave between two updates."""

One = TypeVar("One")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One, in numbers that fit any run: parts of it, from 0 to below 1.

    Attributes:
        number: from 0; those of one run follow each other.
        at: of this fault's part of the run's updates.
        late: of an update, after its beginning.
        whom: of the ranks or nodes that live then.
    """

    number: int
    kind: str
    at: float
    late: float
    whom: float

    def update(self, updates: int) -> int:
        """In which update of a run of so many it happens; never the first, nor the last.

        >>> [Fault(number=n, kind="", at=0.99, late=0, whom=0).update(20) for n in range(4)]
        [4, 8, 13, 17]
        """
        part = self.number % PER_RUN + EARLY * self.at
        return 1 + int(part / PER_RUN * (updates - 2))

    def of(self, those: Sequence[One]) -> One:
        """The one of `those` that is meant."""
        return those[int(self.whom * len(those))]


def draws(seed: int, kinds: Sequence[str]) -> Iterator[Fault]:
    """All `kinds` in turn, each time in another order. More faults begin with the same ones."""
    chance = random.Random(seed)  # noqa: S311  # it has to repeat
    number = 0
    while True:
        for kind in chance.sample(kinds, len(kinds)):
            at, late, whom = chance.random(), chance.random(), chance.random()
            yield Fault(number=number, kind=kind, at=at, late=late, whom=whom)
            number += 1
