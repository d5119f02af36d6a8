"""What a rehearsal runs, and the faults that it draws from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from orchestrator.cli.start import describe, prepare
from orchestrator.config.composer import compose
from orchestrator.config.program import is_program
from orchestrator.config.rules import planned_survival
from orchestrator.config.schema import Config, node_range
from orchestrator.errors import ConfigError, UsageError
from orchestrator.health.faults import check_lending

PER_RUN = 4
LEAST_UPDATES = 5 * PER_RUN
"""Each fault has a part of the run of its own, in which what it breaks can be whole again."""
EARLY = 0.7  # of its part; the rest is for what follows from it

KILL_RANK, KILL_TWO, KILL_NODE = "kill a rank", "kill two ranks", "kill a node"
FREEZE_RANK, STOP, KILL_LAUNCHER = "freeze a rank", "stop, resume", "kill the launcher"
CUT, SILENCE, FILL_DISK = "cut a node's links", "silence a node", "fill the disk"
HERE = (KILL_RANK, KILL_NODE, FREEZE_RANK, STOP, KILL_TWO, KILL_LAUNCHER, CUT, SILENCE, FILL_DISK)
"""Kinds on simulated nodes."""

KILL_SCRIPT, REQUEUE = "kill the batch script", "requeue"
ASK_TO_LEAVE = "ask to leave"
ON_SLURM = (*(kind for kind in HERE if kind != KILL_LAUNCHER), KILL_SCRIPT, REQUEUE, ASK_TO_LEAVE)
"""On SLURM: what a user may do to a job of their own."""

LINKS = frozenset({CUT, SILENCE})
"""These need a kernel that lends a process's connections."""
ORDERLY = (STOP, REQUEUE, ASK_TO_LEAVE)
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


RESTARTS = "run.max_restarts=1000"
SMALL = (
    "train.updates=60", "train.checkpoint_every=5", "cluster.heartbeat_timeout_s=4", "tracker=none",
    "run.snapshot=false", RESTARTS,
)  # fmt: skip
"""What a rehearsal has where its command line says nothing else."""

SAFER = ("run.survive=true", "accumulation.reduction=reproducible")
"""What it tries to have beside: left out where the job cannot have it."""

MOST_FAULTS = 1000
CLOSE = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsalSpec:
    """What every run of a rehearsal is started with.

    Attributes:
        kinds: of faults.
        notes: what it goes without, and why.
    """

    config: Config
    overrides: tuple[str, ...]
    config_dir: str | None
    ranks: int
    kinds: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def updates(self) -> int:
        return int(self.config.train.updates or 0)

    @property
    def to_the_bit(self) -> bool:
        """Whether weights have to be those of the undisturbed run: on fewer ranks, or more, sums
        are rounded otherwise, unless they are reproducible.
        """
        least, most = node_range(self.config.cluster.nodes)
        same_ranks = not planned_survival(self.config).on and least == most
        return same_ranks or self.config.accumulation.reduction == "reproducible"

    @property
    def equality(self) -> str:
        """What "equal" means, in words."""
        if self.to_the_bit:
            return "the same loss in every update, and the same final weights, to the bit"
        return (
            f"the same samples in every update, and losses within {CLOSE:g}: "
            "accumulation.reduction=fast rounds otherwise on another number of ranks"
        )


def plan_rehearsal(
    given: Sequence[str], config_dir: str | None, faults: int, only: Sequence[str] = ()
) -> RehearsalSpec:
    """Check what is to be rehearsed. Nothing is written.

    Args:
        only: kinds of faults; all that there are, without.

    Raises:
        UsageError: it cannot be started, or not rehearsed.
    """
    if not 1 <= faults <= MOST_FAULTS:
        raise ConfigError(f"--faults {faults}: there can be 1 to {MOST_FAULTS} in a rehearsal")
    keys = {one.lstrip("+").partition("=")[0] for one in given}
    first = compose(given, config_dir)
    _refuse(first, keys)
    possible = _possible(first)
    _refuse_unknown(only, possible)
    small = [one for one in SMALL if one != RESTARTS or not _queued_once(first)]
    overrides = (*given, *(one for one in small if one.partition("=")[0] not in keys))
    config = compose(overrides, config_dir)
    _refuse_few(config.train.updates)
    plan = prepare(config)
    notes: list[str] = []
    for more in SAFER:
        if more.partition("=")[0] in keys:
            continue
        try:
            safer = compose((*overrides, more), config_dir)
            prepare(safer)
        except UsageError as refusal:
            notes.append(f"without {more}: {refusal}")
        else:
            config, overrides = safer, (*overrides, more)
    _refuse_unplaced(config)
    kinds = tuple(kind for kind in possible if kind in only or not only)
    for barred, why in _barred(config, plan.ranks):
        if barred & {*kinds}:
            kinds = tuple(kind for kind in kinds if kind not in barred)
            if only:
                raise ConfigError(f"--only {', '.join(only)}: {why}")
            notes.append(f"without {' and '.join(sorted(barred))}: {why}")
    return RehearsalSpec(
        config=config, overrides=overrides, config_dir=config_dir, ranks=plan.ranks,
        kinds=kinds, notes=tuple(notes),
    )  # fmt: skip


def _refuse(config: Config, keys: set[str]) -> None:
    if is_program(config.job):
        raise ConfigError(
            "a rehearsal compares losses and weights with an undisturbed run's, and a program "
            "keeps its own; give it a job"
        )
    if config.cluster.kind not in ("local", "slurm"):
        raise ConfigError(
            f"a rehearsal is on simulated nodes, or on SLURM, not on a {config.cluster.kind} "
            "cluster; leave cluster= out, and say how many: cluster.nodes=2"
        )
    if config.cluster.allocation == "current":
        raise ConfigError(
            "a rehearsal submits jobs of its own, which come and go; leave "
            "cluster.allocation=current out"
        )
    if "run.dir" in keys:
        raise ConfigError("a rehearsal has a folder for each of its runs; use --into FOLDER")


def _possible(config: Config) -> tuple[str, ...]:
    """The kinds of faults that there are where it is to run."""
    return HERE if config.cluster.kind == "local" else ON_SLURM


def _refuse_unknown(only: Sequence[str], possible: Sequence[str]) -> None:
    for kind in only:
        if kind not in possible:
            raise ConfigError(
                f"--only {kind!r}: there is no such fault here; there are {', '.join(possible)}"
            )


def _refuse_unplaced(config: Config) -> None:
    """Ask the scheduler now whether it would take it, rather than from the first run."""
    if config.cluster.kind == "slurm":
        _, said = describe(config)
        if said["refused"]:
            raise ConfigError(said["scheduler"])


def _queued_once(config: Config) -> bool:
    return config.cluster.kind == "slurm" and not config.cluster.requeue


def _barred(config: Config, ranks: int) -> Iterator[tuple[frozenset[str], str]]:
    """Kinds that this job cannot have, and why."""
    if _queued_once(config):
        yield frozenset({REQUEUE}), "cluster.requeue=false: SLURM queues it once only"
    if ranks == 1:
        yield LINKS, "a single rank has no connections"
        return
    try:
        check_lending()
    except UsageError as refusal:
        yield LINKS, str(refusal)


def _refuse_few(updates: int | None) -> None:
    if updates is None or updates < LEAST_UPDATES:
        raise ConfigError(
            f"train.updates={'null' if updates is None else updates}: {PER_RUN} faults of a run "
            f"need {LEAST_UPDATES} updates at the least; try train.updates={LEAST_UPDATES}"
        )
