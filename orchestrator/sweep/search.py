"""Search: trials chosen by Optuna from the results of earlier ones."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import random
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from optuna import load_study
from optuna.exceptions import OptunaError
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from orchestrator.cli.follow import Interrupts, OutputOptions
from orchestrator.cli.resume import standing_in
from orchestrator.cli.status import cancel, statuses
from orchestrator.clusters.api import class_for, class_of
from orchestrator.config.command_line import CommandLine, check_overrides, key_of, literally
from orchestrator.config.composer import Composer
from orchestrator.config.guard import guarded
from orchestrator.config.job_source import read_once
from orchestrator.config.loader import OF_A_SEARCH
from orchestrator.config.rules import at_once
from orchestrator.config.schema import SweepConfig
from orchestrator.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    ClusterError,
    ConfigError,
    Interrupted,
    NotNow,
    RunFailed,
    RunFolderError,
    UsageError,
)
from orchestrator.plan.plan_warnings import named_numbers
from orchestrator.report.status_tables import print_search, words_of
from orchestrator.report.terminal import command, say
from orchestrator.rundir.files import PRIVATE_FILE, make_folder, names_in, read_json, write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import Tail
from orchestrator.rundir.outcome import State, describe_culprit, write_end
from orchestrator.rundir.status import ENDED_STATES, find_runs
from orchestrator.sweep.cells import REPLACED, Cell, Do, cells_of, gpu_hours, made_of
from orchestrator.sweep.local import LocalQueue, PointEnded, Room, share_of
from orchestrator.sweep.points import Point, telling, trial_point
from orchestrator.sweep.search_space import Axis, Space, space_of
from orchestrator.sweep.submission import NoSuchFigure, alone_in, measured, submit
from orchestrator.units import plural

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.study import Study
    from optuna.trial import FrozenTrial


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


TRIES = 8  # combinations in which a value is tried before it counts as one that none can have
ON_A_SCHEDULER = 4  # trials at once with sweep.parallel=auto: all at once would be no search


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One search.

    Attributes:
        folder: the sweep's.
        trials: how many there are to be.
        most: at once; None: as many as this machine has room for.
        attended: trials run on this machine, held by the search.
    """

    composer: Composer
    space: Space
    sweep: SweepConfig
    folder: Path
    trials: int
    most: int | None
    attended: bool

    @property
    def maximize(self) -> bool:
        return self.sweep.direction == "maximize"

    @property
    def made_of(self) -> dict[str, Any]:
        """What makes it this search: its trials are those of no search that differs in it."""
        return {
            **{axis.key: axis.told() for axis in self.space.axes},
            **{f"sweep.{name}": getattr(self.sweep, name) for name in OF_A_SEARCH},
            **{key_of(o): o for o in self.space.fixed if telling(o)},
        }

    def point(self, number: int, drawn: Mapping[str, Any]) -> Point:
        """A trial's. Raises `UsageError` where there can be none."""
        return _composed(self.composer, self.space, number, drawn)


def asked_of(composer: Composer) -> Asked:
    """Raises `ConfigError` for what cannot be searched."""
    with guarded():
        space = space_of(composer.loader.swept(composer.stated))
    with read_once():
        points = _sampled(composer, space)
    first = points[0]
    sweep, attended = first.config.sweep, class_for(first.config).attended
    trials = sweep.trials or 0
    if sweep.search == "grid":
        trials = _of_grid(space, sweep)
    _refuse_beyond(points, trials)
    most = at_once(sweep.parallel)
    return Asked(
        composer=composer,
        space=space,
        sweep=sweep,
        folder=first.folder.parent,
        trials=trials,
        most=most if attended else most or ON_A_SCHEDULER,
        attended=attended,
    )


def _composed(composer: Composer, space: Space, number: int, drawn: Mapping[str, Any]) -> Point:
    [item] = composer.points([space.overrides(drawn)], number)
    return trial_point(item, number)


def _sampled(composer: Composer, space: Space) -> list[Point]:
    """A point with each alternative, and near the ends of each interval. Raises `ConfigError` for
    values that no trial could have, as far as a few combinations with the others tell.
    """
    points: list[Point] = []
    wrong: dict[str, str] = {}
    for axis in space.axes:
        for value in axis.samples:
            sentence = ""
            for drawn in _combinations(space, axis, value):
                try:
                    points.append(_composed(composer, space, 0, drawn))
                    break
                except UsageError as error:
                    sentence = sentence or str(error)
            else:
                wrong[axis.text(value).lstrip("+")] = sentence
    if wrong and not points:  # it is nothing that was chosen
        raise ConfigError("\n".join(dict.fromkeys(wrong.values())))
    if wrong:
        raise ConfigError(
            "\n".join(f"no trial can have {text}: {why}" for text, why in wrong.items())
        )
    return points


def _combinations(space: Space, axis: Axis, value: Any) -> Iterator[dict[str, Any]]:
    """Different ones, in which an axis has this value."""
    drawn = random.Random(0)  # noqa: S311  # nothing secret
    seen: list[dict[str, Any]] = []
    for number in range(TRIES):
        found = {
            other.key: drawn.choice(other.samples) if number else other.samples[0]
            for other in space.axes
        } | {axis.key: value}
        if found not in seen:
            seen.append(found)
            yield found


def _of_grid(space: Space, sweep: SweepConfig) -> int:
    if space.size is None:
        endless = next(axis.name for axis in space.axes if not axis.texts)
        raise ConfigError(
            f"sweep.search=grid tries all points, and {endless} has them without end; give it "
            f"values (a,b or range(…)), or use sweep.search=tpe"
        )
    if (sweep.trials or 0) > space.size:
        raise ConfigError(
            f"sweep.trials={sweep.trials}, but the grid has {space.size} points; leave it out"
        )
    return sweep.trials or space.size


def _refuse_beyond(points: Sequence[Point], trials: int) -> None:
    """Raise `ConfigError` where trials like these cost more than `budget.gpu_hours`, or might."""
    limit = points[0].config.budget.gpu_hours
    if limit is None:
        return
    hours = [gpu_hours(Cell(point=p, do=Do.BEGIN, why="", made_of={})) for p in points]
    known = [hour for hour in hours if hour is not None]
    if len(known) < len(hours):
        raise ConfigError(
            f"budget.gpu_hours={limit:g} cannot be kept: how long a trial runs is not known; set "
            f"facts.update_s, or the limit cluster.time_min"
        )
    if (total := trials * max(known)) > limit:
        raise ConfigError(
            f"{trials} trials take up to {total:.3g} GPU-hours by their plans, more than "
            f"budget.gpu_hours={limit:g}"
        )


NAME = "search"
DAMAGED = (
    OptunaError, ValueError, LookupError, TypeError, AttributeError, AssertionError, RuntimeError,
)  # fmt: skip
MADE_OF = "made_of"  # attribute of the study: what the search is one of
WHY = "why"  # attributes of a trial: why it has no value;
SAME_AS = "same_as"  # the earlier trial that is the same point


class _FolderIsHeld(JournalFileSymlinkLock):
    """No lock beside the folder's own, which ends with its process; this one would not."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


class Journal:
    """The trials of one search.

    Args:
        path: of the file; made where there is none.

    Raises:
        RunFolderError: the file is damaged, or cannot be written.
    """

    def __init__(self, path: Path, direction: str) -> None:
        self._path = path
        try:
            _end_with_a_line(path)
            lock = _FolderIsHeld(str(path))
            self._storage = JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
            studies = self._storage.get_all_studies()
            if not studies:
                self._storage.create_new_study([StudyDirection[direction.upper()]], NAME)
            self.study: Study = load_study(study_name=NAME, storage=self._storage)
            self._id = self._storage.get_study_id_from_name(NAME)
        except OSError as error:
            raise RunFolderError(f"{path} cannot be written: {error.strerror}") from error
        except DAMAGED as error:
            raise RunFolderError(f"{path} is damaged: {error}") from error

    @property
    def made_of(self) -> dict[str, Any] | None:
        """What the search is one of; None where nothing was written yet."""
        found: Any = self._storage.get_study_user_attrs(self._id).get(MADE_OF)
        if not isinstance(found, dict | None):
            raise RunFolderError(f"{self._path} is damaged: it does not say which search it is of")
        return found

    @made_of.setter
    def made_of(self, value: Mapping[str, Any]) -> None:
        self._storage.set_study_user_attr(self._id, MADE_OF, dict(value))

    @property
    def trials(self) -> Sequence[FrozenTrial]:
        """All of them, by their numbers."""
        return self._storage.get_all_trials(self._id, deepcopy=False)

    @property
    def has_value(self) -> bool:
        return any(trial.state is TrialState.COMPLETE for trial in self.trials)

    def check(self, distributions: Mapping[str, BaseDistribution]) -> None:
        """Raise `RunFolderError` where a trial is none that this search could have written."""
        for trial in self.trials:
            try:
                sound = _is_of(trial, distributions)
            except DAMAGED:
                sound = False
            if not sound:
                raise RunFolderError(
                    f"{self._path} is damaged: its trial {trial.number} is none of this search"
                )

    def trial(self, number: int) -> FrozenTrial:
        return self._storage.get_trial(self._trial_id(number))

    def begin(
        self,
        drawn: Mapping[str, Any],
        distributions: Mapping[str, BaseDistribution],
        same_as: int | None = None,
    ) -> int:
        """Write down a new trial; gives its number."""
        made = create_trial(
            state=TrialState.RUNNING,
            params=dict(drawn),
            distributions=dict(distributions),
            user_attrs={} if same_as is None else {SAME_AS: same_as},
        )
        return self._storage.get_trial(self._storage.create_new_trial(self._id, made)).number

    def report(self, number: int, update: int, value: float) -> None:
        """What a trial's objective was after an update."""
        self._storage.set_trial_intermediate_value(self._trial_id(number), update, value)

    def complete(self, number: int, value: float) -> None:
        self._end(number, TrialState.COMPLETE, value)

    def prune(self, number: int, why: str) -> None:
        """It ended early: what counts of it is its objective at the last update that was told."""
        self._say_why(number, why)
        told = self.trial(number).intermediate_values
        self._end(number, TrialState.PRUNED, told[max(told)] if told else None)

    def fail(self, number: int, why: str) -> None:
        self._say_why(number, why)
        self._end(number, TrialState.FAIL, None)

    def _say_why(self, number: int, why: str) -> None:
        self._storage.set_trial_user_attr(self._trial_id(number), WHY, why)

    def _end(self, number: int, state: TrialState, value: float | None) -> None:
        values = None if value is None else [value]
        self._storage.set_trial_state_values(self._trial_id(number), state, values)

    def _trial_id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._id, number)


def _is_of(trial: FrozenTrial, distributions: Mapping[str, BaseDistribution]) -> bool:
    """Raises one of `DAMAGED` where it is no trial at all."""
    create_trial(  # which looks at what it is given
        state=trial.state,
        value=trial.value,
        params=trial.params,
        distributions=dict(distributions),
        user_attrs=trial.user_attrs,
        intermediate_values=trial.intermediate_values,
    )
    same_as, why = trial.user_attrs.get(SAME_AS), trial.user_attrs.get(WHY, "")
    drawn = trial.distributions == distributions and isinstance(why, str)
    return drawn and (same_as is None or same_as in range(trial.number))


def _end_with_a_line(path: Path) -> None:
    """Cut off what a writer that was killed has left of a line: the next would continue it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, PRIVATE_FILE)
    with os.fdopen(descriptor, "rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


class Watched:
    """The objective of one trial while it runs.

    Args:
        since: the update that was told last, by an earlier start of the search; -1 for none.
    """

    def __init__(self, run: RunDir, objective: str, since: int = -1) -> None:
        self._tail, self._objective, self._told = Tail(run.metrics), objective, since

    def new(self) -> Iterator[tuple[int, float]]:
        """(update, objective) of what was written since; an update that is redone counts once."""
        for record in self._tail.read():
            update = record.get("update", -1)
            figures = record if self._objective == "loss" else record.get("evaluation") or {}
            value = figures.get(self._objective)
            if not isinstance(value, int | float) or not math.isfinite(value):
                continue
            if update > self._told and is_told(update + 1):
                self._told = update
                yield update, float(value)


def is_told(updates: int) -> bool:
    """Whether a trial is judged after so many updates: those of two digits, and zeros behind. So
    any two trials are judged after the same ones, and a long one no more than 90 times a decade.

    >>> [n for n in (7, 99, 101, 110, 1010, 1100) if is_told(n)]
    [7, 99, 110, 1100]
    """
    return updates % 10 ** max(0, len(str(updates)) - 2) == 0


class Pruner:
    """Rules on trials. Those that end early count as worse than what they were compared with."""

    def __init__(self, journal: Journal, name: str) -> None:
        from optuna.pruners import MedianPruner

        self._journal = journal
        self._pruner = MedianPruner() if name == "median" else None

    def judge(self, number: int, watched: Watched) -> str | None:
        """Write down what is new of a trial; why it is to end now, if it is."""
        for update, value in self._new(watched):
            self._journal.report(number, update, value)
            trial = self._journal.trial(number)
            if self._pruner and self._pruner.prune(self._journal.study, trial):
                return f"worse after update {update + 1} than the median of those before it"
        return None

    def complete(self, number: int, watched: Watched) -> None:
        """Write down the rest of a trial that has finished, for others to be compared with."""
        for update, value in self._new(watched):
            self._journal.report(number, update, value)

    def _new(self, watched: Watched) -> Iterator[tuple[int, float]]:
        return watched.new() if self._pruner else iter(())


STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}


def write_table(asked: Asked, journal: Journal, folders: Mapping[int, Path]) -> dict[str, Any]:
    """Write search.json anew, and give what it says.

    Args:
        folders: of trials that have one, by number.
    """
    trials: list[dict[str, Any]] = []
    for trial in journal.trials:
        same_as = trial.user_attrs.get(SAME_AS)
        folder = folders.get(trial.number if same_as is None else same_as)
        trials.append({
            "number": trial.number,
            "state": STATES.get(trial.state.name, "open"),
            "value": trial.value if trial.state.name == "COMPLETE" else None,
            "point": [axis.text(trial.params[axis.key]).lstrip("+") for axis in asked.space.axes],
            "folder": folder.name if folder is not None else None,
            "same_as": same_as,
            "why": trial.user_attrs.get(WHY),
        })  # fmt: skip
    line = asked.composer.line
    config_dir = line.config_dir and str(Path(line.config_dir).expanduser().absolute())
    table = {
        "search": asked.sweep.search,
        "objective": asked.sweep.objective,
        "maximize": asked.maximize,
        "wanted": asked.trials,
        "trials": trials,
        "best": _best(trials, maximize=asked.maximize),
        "line": {
            "overrides": list(line.overrides), "config_dir": config_dir,
            "config_name": line.config_name, "folder": os.getcwd(),  # noqa: PTH109  # as text
        },
    }  # fmt: skip
    write_json(RunDir(asked.folder).search, table)
    return table


def _best(trials: list[dict[str, Any]], *, maximize: bool) -> int | None:
    """The number of the best; of equal ones the first."""
    known = [trial for trial in trials if trial["value"] is not None]
    if not known:
        return None
    sign = -1 if maximize else 1
    return min(known, key=lambda trial: (sign * trial["value"], trial["number"]))["number"]


def why_no_value(cell: Cell) -> str:
    """Of a run that is over; "" where it has finished."""
    [status], _ = statuses([cell.run])
    if status.state == "finished":
        return ""
    culprit = (cell.run.read_result() or {}).get("culprit") if status.state == "failed" else None
    return describe_culprit(culprit) if culprit else status.reason or f"it was {status.state}"


OVER = (*ENDED_STATES, "lost", "damaged", "private")
LOOK_S = 1.0
SLICE_S = 0.1


class Place(Protocol):
    """Entered, it counts interrupts. With the first nothing more is started."""

    interrupts: Interrupts

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    @property
    def running(self) -> Sequence[Cell]:
        """Those to wait for; after an interrupt none that goes on without us."""
        ...

    @property
    def left(self) -> Sequence[Cell]:
        """Those that go on without us, if we leave now."""
        ...

    def has_room(self, cell: Cell) -> bool: ...
    def start(self, cell: Cell) -> bool:
        """Start a trial; False where it has to wait after all. Raises `ConfigError` where it can
        never run.
        """
        ...

    def follow(self, cell: Cell) -> None:
        """It runs already, as an earlier start of the search has left it."""
        ...

    def wait(self) -> list[PointEnded]:
        """Those that have ended, after a moment at the most."""
        ...

    def stop(self, cell: Cell) -> None:
        """At its next update boundary, with a checkpoint."""
        ...


class Followed:
    """Runs that others hold: asked about, all of them at once."""

    def __init__(self, manner: OutputOptions) -> None:
        self.cells: list[Cell] = []
        self._manner = manner
        self._to_stop: list[Cell] = []  # of those, which nobody could tell yet
        self._next = 0.0

    def ended(self) -> list[PointEnded]:
        if not self.cells or time.monotonic() < self._next:
            return []
        found = statuses(RunDir(cell.run.path) for cell in self.cells)[0]
        kinds = {cell.point.config.cluster.kind for cell in self.cells}
        self._next = time.monotonic() + max(class_of(kind).look_every_s for kind in kinds)
        over = [c for c, status in zip(self.cells, found, strict=True) if status.state in OVER]
        self.cells = [cell for cell in self.cells if cell not in over]
        self._to_stop = [c for c in self._to_stop if c in self.cells and _refusal(c)]
        return [PointEnded(cell=cell, exit_code=0) for cell in over]

    def stop(self, cell: Cell) -> None:
        """Now, or at a later look: it may be over in this moment, or its scheduler silent."""
        if cell in self.cells and (why := _refusal(cell)):
            self._to_stop.append(cell)
            if not self._manner.quiet:
                say(self._manner.console, f"not stopped yet: {why}", "yellow")


def _refusal(cell: Cell) -> str:
    """Have a run stop; why that could not be, or ""."""
    try:
        cancel(cell.run)
    except ClusterError as error:
        return str(error)
    return ""


class Here:
    """On this machine: trials end with the search, and the next start lets them go on."""

    def __init__(self, manner: OutputOptions, most: int | None) -> None:
        self._room = Room(most)
        self._queue = LocalQueue(OutputOptions(console=manner.console, quiet=True), self._room)
        self._followed = Followed(manner)
        self.interrupts = self._queue.interrupts

    def __enter__(self) -> Self:
        self._queue.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._queue.__exit__(kind, error, trace)

    @property
    def running(self) -> Sequence[Cell]:
        return [*self._queue.running, *([] if self.interrupts.count else self._followed.cells)]

    @property
    def left(self) -> Sequence[Cell]:
        return self._followed.cells

    def has_room(self, cell: Cell) -> bool:
        return not self._followed.cells and self._room.has(share_of(cell))

    def start(self, cell: Cell) -> bool:
        return self._queue.start(cell)

    def follow(self, cell: Cell) -> None:
        self._followed.cells.append(cell)

    def wait(self) -> list[PointEnded]:
        one = self._queue.wait_one(SLICE_S)
        if not self._queue.running and one is None:
            time.sleep(SLICE_S)  # what is followed alone
        return [*([one] if one else []), *self._followed.ended()]

    def stop(self, cell: Cell) -> None:
        self._queue.cancel(cell)
        self._followed.stop(cell)


class OnScheduler:
    """Each trial a job, which goes on whatever becomes of the search."""

    def __init__(self, manner: OutputOptions, most: int) -> None:
        self._manner, self._most = manner, most
        self._followed = Followed(manner)
        self._full = ""  # why it takes no more, until one has ended
        self.interrupts = Interrupts()

    def __enter__(self) -> Self:
        self.interrupts.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.interrupts.__exit__(kind, error, trace)

    @property
    def running(self) -> Sequence[Cell]:
        return [] if self.interrupts.count else self._followed.cells

    @property
    def left(self) -> Sequence[Cell]:
        return self._followed.cells

    def has_room(self, cell: Cell) -> bool:
        del cell
        return not self._full and len(self._followed.cells) < self._most

    def start(self, cell: Cell) -> bool:
        try:
            submit([cell], self._manner, wait=False, interrupts=self.interrupts)
        except Interrupted:
            return False
        except UsageError as error:
            if self.interrupts.count:  # a Ctrl-C ends the scheduler's commands, too
                return False
            if not isinstance(error, NotNow) or not self._followed.cells:
                raise
            self._wait_for_room(str(error))
            return False
        self.follow(cell)
        return True

    def _wait_for_room(self, why: str) -> None:
        self._full = why
        if not self._manner.quiet:
            say(self._manner.console, f"{why}\nthe next trial waits until one has ended", "yellow")

    def follow(self, cell: Cell) -> None:
        self._followed.cells.append(cell)

    def wait(self) -> list[PointEnded]:
        time.sleep(SLICE_S)
        ended = self._followed.ended()
        self._full = "" if ended else self._full
        return ended

    def stop(self, cell: Cell) -> None:
        self._followed.stop(cell)


def place_of(asked: Asked, manner: OutputOptions) -> Place:
    return Here(manner, asked.most) if asked.attended else OnScheduler(manner, asked.most or 1)


# What was drawn; its cell, or why there can be none; or the earlier trial that is the same point.
Next = tuple[dict[str, Any], Cell | str | None, int | None]
RUNNING, COMPLETE, PRUNED = "RUNNING", "COMPLETE", "PRUNED"


@dataclass(kw_only=True, slots=True)
class Trial:
    """One that has not been told yet, or that is about to stop."""

    number: int
    cell: Cell
    watched: Watched
    over: bool = False  # its state is final; its run is only to end
    stopping: bool = False  # it was told to, with an earlier start: it goes on once it has


class Searcher:
    """One start of a search."""

    def __init__(self, asked: Asked, journal: Journal, place: Place, manner: OutputOptions) -> None:
        self._asked, self._journal, self._place, self._manner = asked, journal, place, manner
        self._pruner = Pruner(journal, asked.sweep.prune)
        self._running: dict[Path, Trial] = {}
        self._waiting: list[Trial] = []
        self._folders: dict[int, Path] = {}
        self._next: Next | None = None  # chosen by all that is known now, but not begun
        self.table: dict[str, Any] = {}

    def run(self) -> None:
        """To the end of the last trial, or to an interrupt.

        Raises:
            ConfigError: what an earlier start has left is of other code, or no trial so far has
                measured the objective.
        """
        self._find_again()
        self._show()
        while True:
            if not self._place.interrupts.count:
                self._start_waiting()
                self._draw_more()
            if not self._place.running:
                break
            for ended in self._place.wait():
                self._ended(ended)
            self._judge()

    # What an earlier start has left.

    def _find_again(self) -> None:
        trials = [t for t in self._journal.trials if SAME_AS not in t.user_attrs]
        found = {t.number: point for t in trials if (point := self._point_of(t)) is not None}
        cells = dict(zip(found, cells_of(list(found.values())), strict=True)) if found else {}
        self._folders = {n: cell.run.path for n, cell in cells.items() if cell.run.config.exists()}
        self._refuse_changed([t for t in trials if t.number in cells], cells)
        for trial in trials:
            cell = cells.get(trial.number)
            if cell is not None and trial.state.name == PRUNED:
                self._end_pruned(trial, cell)
            elif cell is not None and trial.state.name == RUNNING:
                self._go_on(trial, cell)
        self._tell_twins()

    def _point_of(self, trial: FrozenTrial) -> Point | None:
        try:
            return self._asked.point(trial.number, trial.params)
        except UsageError as error:
            if trial.state.name == RUNNING:  # killed before it could say so
                self._journal.fail(trial.number, str(error))
            return None

    def _refuse_changed(self, trials: Sequence[FrozenTrial], cells: Mapping[int, Cell]) -> None:
        """What has a value, or may get one, has to be of one code, and of the same data."""
        changed = {
            t.number: cells[t.number].why
            for t in trials
            if t.state.name in (RUNNING, COMPLETE, PRUNED)
            and cells[t.number].why.startswith("changed")
        }
        if changed:
            raise ConfigError(
                f"{named_numbers('trial', sorted(changed))} of {self._asked.folder} cannot be "
                f"compared with what would run now ({next(iter(changed.values()))}); choose "
                f"another run.dir, or begin the search anew with --force"
            )

    def _go_on(self, trial: FrozenTrial, cell: Cell) -> None:
        found = self._trial(trial.number, cell, max(trial.intermediate_values, default=-1))
        if cell.do is Do.WAIT:
            found.stopping = cell.run.cancel.exists()
            self._running[cell.run.path] = found
            self._place.follow(cell)
        elif cell.do is Do.NOTHING or cell.why == "failed":
            self._tell(found, None)
        else:
            self._waiting.append(found)

    def _end_pruned(self, trial: FrozenTrial, cell: Cell) -> None:
        """Its end may not have come to its run yet."""
        if cell.do is Do.WAIT:
            self._running[cell.run.path] = self._trial(trial.number, cell)
            self._running[cell.run.path].over = True
            self._place.follow(cell)
            self._stop(cell, trial.user_attrs.get("why", ""))
        elif cell.why == "lost":
            self._note_pruned(cell, trial.user_attrs.get("why", ""))
            write_end(cell.run, State.STOPPED)

    # Trials begin.

    def _start_waiting(self) -> None:
        while self._waiting and self._place.has_room(self._waiting[0].cell):
            if not self._start(self._waiting.pop(0)):
                return

    def _start(self, trial: Trial) -> bool:
        """False where it has to wait: what was free a moment ago is not any more."""
        self._folders[trial.number] = trial.cell.run.path
        self._running[trial.cell.run.path] = trial
        try:
            started = self._place.start(trial.cell)
        except ConfigError as error:
            self._forget(trial)
            self._tell(trial, str(error))
            return True
        if not started:
            self._forget(trial)
            self._waiting.insert(0, trial)
        elif not self._manner.quiet:
            chosen = trial.cell.point.overrides[len(self._asked.space.fixed) :]
            say(self._manner.console, f"trial {trial.number} begins: {' '.join(chosen)}", "dim")
        return started

    def _forget(self, trial: Trial) -> None:
        """It does not run; it has a folder only if an earlier start has begun it."""
        del self._running[trial.cell.run.path]
        if not trial.cell.run.config.exists():
            del self._folders[trial.number]

    def _draw_more(self) -> None:
        while not self._waiting and len(self._journal.trials) < self._asked.trials:
            self._next = self._next or self._choose(self._journal.trials)
            drawn, cell, same_as = self._next
            if isinstance(cell, Cell) and not self._place.has_room(cell):
                return
            self._next = None
            number = self._journal.begin(drawn, distributions(self._asked.space), same_as)
            if isinstance(cell, Cell):
                self._begin(number, cell)
            elif cell is not None:
                self._journal.fail(number, cell)
                self._told(number)
            self._tell_twins()
            self._show()

    def _begin(self, number: int, cell: Cell) -> None:
        """A new trial. One of this very point may be there, if the journal has lost its end."""
        if cell.do is Do.BEGIN:
            self._start(self._trial(number, cell))
            return
        self._folders[number] = cell.run.path
        self._go_on(self._journal.trial(number), cell)
        self._start_waiting()

    def _choose(self, trials: Sequence[FrozenTrial]) -> Next:
        space = self._asked.space
        drawn = draw(space, self._asked.sweep, trials)
        for earlier in trials:
            if space.overrides(earlier.params) == space.overrides(drawn):
                return drawn, None, earlier.user_attrs.get(SAME_AS, earlier.number)
        return drawn, self._cell(len(trials), drawn), None

    def _cell(self, number: int, drawn: Mapping[str, Any]) -> Cell | str:
        """Why there can be none, where it is so."""
        try:
            point = self._asked.point(number, drawn)
            if point.folder.exists():
                return cells_of([point])[0]
            made = made_of(point.config, point.of)
            return Cell(point=point, do=Do.BEGIN, why="new", made_of=made)
        except UsageError as error:
            return str(error)

    # Trials end.

    def _judge(self) -> None:
        for trial in self._running.values():
            if trial.over or not (why := self._pruner.judge(trial.number, trial.watched)):
                continue
            self._journal.prune(trial.number, why)
            trial.over = True
            self._stop(trial.cell, why)
            self._told(trial.number)

    def _stop(self, cell: Cell, why: str) -> None:
        self._note_pruned(cell, why)
        self._place.stop(cell)

    def _note_pruned(self, cell: Cell, why: str) -> None:
        cell.run.write_own(cell.run.pruned, {"why": why})

    def _ended(self, ended: PointEnded) -> None:
        trial = self._running.pop(ended.cell.run.path)
        if trial.over:
            return
        result = None if ended.refusal else trial.cell.run.read_result()
        finished = result is not None and result["state"] == "finished"
        if self._place.interrupts.count and not finished:
            return  # it goes on with the next start
        [cell] = cells_of([trial.cell.point]) if trial.stopping else [trial.cell]
        if trial.stopping and cell.why in (State.STOPPED.value, "lost"):
            self._go_on(self._journal.trial(trial.number), cell)
        else:
            self._tell(trial, ended.refusal)

    def _tell(self, trial: Trial, refusal: str | None) -> None:
        """Write down what a trial came to, once its run is over."""
        try:
            why = refusal or why_no_value(trial.cell)
            value = None if why else measured(trial.cell.run, self._asked.sweep.objective)
        except RunFailed as error:
            why, value = str(error), None
            if isinstance(error, NoSuchFigure) and not self._journal.has_value:
                self._journal.fail(trial.number, why)
                self._show()
                more = "if other trials will, the same line goes on with them"
                raise ConfigError(f"{why}; {more}") from error
        if value is None:
            self._journal.fail(trial.number, why)
        else:
            self._pruner.complete(trial.number, trial.watched)
            self._journal.complete(trial.number, value)
        self._told(trial.number)

    def _told(self, number: int) -> None:
        self._next = None
        self._tell_twins()
        self._show()
        if not self._manner.quiet:
            say(self._manner.console, words_of(self.table, number))

    def _tell_twins(self) -> None:
        """A point that is drawn again is not computed again."""
        for trial in self._journal.trials:
            same_as = trial.user_attrs.get(SAME_AS)
            if same_as is None or trial.state.name != RUNNING:
                continue
            first = self._journal.trial(same_as)
            if first.state.name == COMPLETE:
                self._journal.complete(trial.number, first.value or 0.0)
            elif first.state.name == PRUNED:
                self._journal.prune(trial.number, first.user_attrs.get("why", ""))
            elif first.state.name != RUNNING:
                self._journal.fail(trial.number, first.user_attrs.get("why", ""))

    # What people see.

    def _trial(self, number: int, cell: Cell, since: int = -1) -> Trial:
        watched = Watched(cell.run, self._asked.sweep.objective, since)
        return Trial(number=number, cell=cell, watched=watched)

    def _show(self) -> None:
        self.table = write_table(self._asked, self._journal, self._folders)


def search(composer: Composer, manner: OutputOptions) -> int:
    """Make trials until there are as many as asked for; print them; give the exit code: 0 once one
    trial has a value, whatever became of others.

    Raises:
        ConfigError: what cannot be searched, or not in this folder.
        RunFolderError: another command is at work in it, or it is damaged.
    """
    asked = asked_of(composer)
    with alone_in(asked.folder):
        journal = journal_of(asked)
        with place_of(asked, manner) as place:
            searcher = Searcher(asked, journal, place, manner)
            searcher.run()
            interrupts, left = place.interrupts.count, len(place.left)
        print_search(searcher.table, manner.console)
        say(manner.console, f"the search's folder: {asked.folder}")
        states = [trial["state"] for trial in searcher.table["trials"]]
        if "open" in states or len(states) < asked.trials:
            if left:
                go = "goes on by itself" if left == 1 else "go on by themselves"
                end = f"to end {'it' if left == 1 else 'them'}: {command('cancel', asked.folder)}"
                say(manner.console, f"{plural(left, 'trial')} {go}; {end}", "bold")
            say(manner.console, f"to go on: {command('resume', asked.folder)}", "bold")
            return EXIT_INTERRUPTED if interrupts > 1 else EXIT_STOPPED
        return EXIT_FINISHED if "complete" in states else EXIT_FAILED


def journal_of(asked: Asked) -> Journal:
    """The search's own, found again or new. Raises `ConfigError` where the folder is another's."""
    folder = RunDir(asked.folder)
    if asked.sweep.force:
        _put_aside(folder)
    elif not folder.journal.exists() and find_runs(folder.path):
        raise ConfigError(
            f"{folder.path} holds runs that are no trials of a search; choose another run.dir, or "
            f"put them aside with --force"
        )
    journal = Journal(folder.journal, "maximize" if asked.maximize else "minimize")
    if journal.made_of is None:
        journal.made_of = asked.made_of
    if differing := [*_differing(journal.made_of or {}, asked.made_of)]:
        raise ConfigError(
            f"{folder.path} holds another search ({', '.join(differing)}); choose another run.dir, "
            f"or begin the search anew with --force"
        )
    journal.check(distributions(asked.space))
    if len(journal.trials) > asked.trials:
        raise ConfigError(
            f"{folder.path} holds {len(journal.trials)} trials already, more than "
            f"sweep.trials={asked.trials}; ask for at least as many"
        )
    return journal


def _differing(before: dict[str, Any], now: dict[str, Any]) -> Generator[str]:
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            yield f"{key.lstrip('+')} is not what it was"


def _put_aside(folder: RunDir) -> None:
    """All that an earlier search has left, where it can be looked at."""
    aside = folder.path / REPLACED
    if not aside.is_dir():
        make_folder(aside)
    number = sum(name.startswith("search-") for name in names_in(aside))
    place = aside / f"search-{number}"
    make_folder(place)
    runs = [path for path in find_runs(folder.path) if path.parent == folder.path]
    for path in (*runs, folder.search, folder.journal):  # the journal last: it says what they are
        with contextlib.suppress(FileNotFoundError):
            path.rename(place / path.name)


def resume_search(
    folder: Path,
    manner: OutputOptions,
    overrides: Sequence[str] = (),
    config_dir: str | None = None,
) -> int:
    """Go on with a search from its folder alone, as its line would.

    Args:
        overrides: in the place of the line's own of the same key.

    Raises:
        RunFolderError: the folder does not say its line.
        ConfigError: what makes it another search.
    """
    check_overrides(overrides)
    line: dict[str, Any] = (read_json(RunDir(folder).search) or {}).get("line") or {}
    if not line:
        raise RunFolderError(f"{RunDir(folder).search} does not say which line the search is of")
    keys = {key_of(override) for override in (*overrides, "run.dir=", "sweep.force=")}
    kept = [override for override in line["overrides"] if key_of(override) not in keys]
    asked = CommandLine(
        overrides=(*kept, *overrides, f"run.dir={literally(str(folder))}"),
        config_dir=config_dir or line["config_dir"],
        config_name=line["config_name"],
        multirun=True,
    )
    with standing_in(Path(line["folder"]), folder):
        composer = Composer(asked)
        composer.compose()
        return search(composer, manner)
