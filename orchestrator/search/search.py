"""Search: trials chosen by Optuna from the results of earlier ones."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any, NoReturn

import optuna
from optuna.exceptions import OptunaError
from optuna.pruners import MedianPruner
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial

from orchestrator.clusters.api import class_for, class_of
from orchestrator.config.command_line import CommandLine, check_overrides, key_of, quote_for_hydra
from orchestrator.config.composer import Composer
from orchestrator.config.loader import OF_A_SEARCH
from orchestrator.config.messages import config_errors
from orchestrator.config.program import is_program
from orchestrator.config.rules import max_concurrent_points
from orchestrator.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    ClusterError,
    ConfigError,
    NotNow,
    RunFolderError,
    UsageError,
    did_you_mean,
    expand_user,
)
from orchestrator.interrupt import interrupts
from orchestrator.report.caller import tell_begun
from orchestrator.report.status_tables import describe_trial, print_search
from orchestrator.report.terminal import command, say
from orchestrator.rundir.files import (
    PRIVATE_FILE,
    READ_PATIENCE_S,
    await_readable,
    is_unreadable_now,
    make_folder,
    read_json,
    write_json,
)
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import HELD_OUT, Record, Tail
from orchestrator.rundir.outcome import describe_culprit
from orchestrator.rundir.status import OVER, UNREADABLE, RunStatus, find_runs
from orchestrator.runs.cancel import cancel
from orchestrator.runs.follow import OutputOptions
from orchestrator.runs.recorded import submission_directory
from orchestrator.runs.start import stated_folder
from orchestrator.runs.status import statuses
from orchestrator.search.space import space_of
from orchestrator.source.modules import read_once
from orchestrator.sweep.local import LocalCapacity, LocalQueue, PointResult
from orchestrator.sweep.points import Point, identifies, trial_point
from orchestrator.sweep.tasks import (
    Action,
    PointTask,
    locked_sweep,
    notes_of,
    replaced_folder,
    submit,
    tasks_of,
)
from orchestrator.units import named_numbers, plural

COMBINATIONS = 8  # tried before a value is refused as impossible in all of them
TRIALS_ON_A_SCHEDULER = 4  # at once with sweep.parallel=auto; all at once would be no search
POLL_S = 0.1
FOLLOW_S = 1.0  # runs elsewhere, whose metrics may lie on a slow disk
STUDY = "search"
MADE_OF = "made_of"  # attribute of the study: what its trials have in common
WHY = "why"  # attribute of a trial: why it has no value
STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}


class Search:
    """A search as its command line describes it.

    Attributes:
        objective: the stated one; see `Objective`.
        trials: how many there are to be.
        most: trials at once; None: as many as this machine has room for.
        attended: trials run on this machine, as children of this process.

    Raises:
        ConfigError: what cannot be searched.
    """

    def __init__(self, composer: Composer) -> None:
        self.composer = composer
        with config_errors():
            self.space = space_of(composer.loader.swept(composer.explicit_overrides))
        where = composer.run_dir or ""
        if chosen := [a.name for a in self.space.axes if f"${{{a.name}}}" in where]:
            raise ConfigError(
                f"run.dir={where}: {chosen[0]} is another one in each trial, and a search has one "
                f"folder; leave it out of run.dir"
            )
        with read_once():
            point = self._check_alternatives()
        self.sweep, self.folder = point.config.sweep, point.folder.parent
        # A program evaluates by itself.
        by_default = self.sweep.objective == "auto" and is_program(point.config.job)
        self.objective = "loss" if by_default else self.sweep.objective
        self.attended = class_for(point.config).attended
        most = max_concurrent_points(self.sweep.parallel)
        self.most = most if self.attended else most or TRIALS_ON_A_SCHEDULER
        self.trials = self.sweep.trials or 0
        if self.sweep.search == "grid":
            self.trials = self.space.grid_size(self.sweep.trials)

    @property
    def maximize(self) -> bool:
        return self.sweep.direction == "maximize"

    @property
    def made_of(self) -> dict[str, Any]:
        """Everything that the trials of one search share."""
        return {
            **{axis.key: axis.to_json() for axis in self.space.axes},
            **{f"sweep.{name}": getattr(self.sweep, name) for name in OF_A_SEARCH},
            **{key_of(o): o for o in self.space.fixed if identifies(o)},
        }

    def point(self, number: int, drawn: Mapping[str, Any]) -> Point:
        """Compose the point of a trial. Raises `UsageError` where there can be none."""
        return trial_point(self.composer, number, self.space.overrides(drawn))

    def _check_alternatives(self) -> Point:
        """Compose a point with each alternative, and with a value of each interval; return one.

        Raises:
            ConfigError: values that no trial could have, as far as a few combinations show.
        """
        point: Point | None = None
        wrong: dict[str, str] = {}
        for axis in self.space.axes:
            for value in axis.samples:
                errors: list[str] = []
                others = [[value] if a is axis else a.samples for a in self.space.axes]
                for values in islice(product(*others), COMBINATIONS):
                    drawn = {a.key: v for a, v in zip(self.space.axes, values, strict=True)}
                    try:
                        point = self.point(0, drawn)
                        break
                    except UsageError as error:
                        errors.append(str(error))
                else:
                    wrong[axis.text(value).lstrip("+")] = errors[0]
        if point is None:  # the cause is none of the values
            raise ConfigError("\n".join(dict.fromkeys(wrong.values())))
        if wrong:
            raise ConfigError(
                "\n".join(f"no trial can have {text}: {why}" for text, why in wrong.items())
            )
        return point


def open_study(search: Search) -> tuple[Study, JournalStorage]:
    """Load the search's study from its journal, or create it; `force` puts an earlier one aside.

    Raises:
        ConfigError: the folder holds something else.
        RunFolderError: the journal is damaged, or cannot be written.
    """
    folder = RunDir(search.folder)
    if search.sweep.force:
        aside = replaced_folder(folder.path, "search")
        make_folder(aside)
        runs = [path for path in find_runs(folder.path) if path.parent == folder.path]
        # The journal moves last: if this is interrupted, it still tells that these are trials.
        for path in (*runs, folder.search, folder.journal):
            with contextlib.suppress(FileNotFoundError):
                path.rename(aside / path.name)
    elif not folder.journal.exists() and find_runs(folder.path):
        raise ConfigError(
            f"{folder.path} holds runs that are no trials of a search; choose another run.dir, or "
            f"put them aside with sweep.force=true"
        )
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        with os.fdopen(os.open(folder.journal, flags, PRIVATE_FILE), "rb+") as file:
            # Cut off an unfinished last line, which Optuna would continue.
            file.truncate(file.read().rfind(b"\n") + 1)
        storage = JournalStorage(JournalFileBackend(str(folder.journal)))
        study = optuna.create_study(
            storage=storage,
            study_name=STUDY,
            direction="maximize" if search.maximize else "minimize",
            load_if_exists=True,
        )
        before = study.user_attrs.get(MADE_OF) or search.made_of
        trials = len(study.trials)
    except OSError as error:
        raise RunFolderError(f"{folder.journal} cannot be written: {error.strerror}") from error
    except (OptunaError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RunFolderError(f"{folder.journal} is damaged: {error}") from error
    now = search.made_of
    if differing := [k for k in sorted(before.keys() | now.keys()) if before.get(k) != now.get(k)]:
        names = dict.fromkeys(key.lstrip("+") for key in differing)
        keys = ", ".join(f"{name} is not what it was" for name in names)
        raise ConfigError(
            f"{folder.path} holds another search ({keys}); choose another run.dir, or begin the "
            f"search anew with sweep.force=true"
        )
    if trials > search.trials:
        raise ConfigError(
            f"{folder.path} holds {trials} trials already, more than sweep.trials={search.trials}; "
            f"ask for at least as many"
        )
    if MADE_OF not in study.user_attrs:
        study.set_user_attr(MADE_OF, now)
    return study, storage


class TrialRuns:
    """The runs of a search that are in progress: children of this process, or others' to follow."""

    def __init__(self, search: Search, output: OutputOptions) -> None:
        quiet = OutputOptions(console=output.console, quiet=True)
        self.queue = LocalQueue(quiet, LocalCapacity(search.most)) if search.attended else None
        self._output, self._most = output, search.most or 1
        self.followed: list[PointTask] = []  # they continue if this process ends
        self._unreadable_since: dict[Path, float] = {}  # by run, in this process's time
        self._full = False  # the scheduler accepts no more until one has ended
        self._next_poll = 0.0

    @property
    def running(self) -> Sequence[PointTask]:
        """The runs to wait for; after an interrupt only children."""
        children = self.queue.running if self.queue else ()
        return [*children, *([] if interrupts.count else self.followed)]

    def has_room(self, task: PointTask) -> bool:
        if self.queue is not None:
            return not self.followed and self.queue.has_room(task)
        return not self._full and len(self.followed) < self._most

    def start(self, task: PointTask) -> bool:
        """Start a trial; return False if it waits. Raises `ConfigError` if it can never run."""
        if self.queue is not None:
            return self.queue.start(task)
        try:
            submit([task], self._output)
        except UsageError as error:
            if interrupts.count:  # Ctrl-C ends the scheduler's commands, too
                return False
            if not isinstance(error, NotNow) or not self.followed:
                raise
            self._full = True
            self._output.note(f"{error}\nthe next trial waits until one has ended", "yellow")
            return False
        self.followed.append(task)
        return True

    def follow(self, task: PointTask) -> None:
        """Wait for a run that an earlier start of the search has left."""
        self.followed.append(task)

    def wait(self) -> list[PointResult]:
        """Wait for a moment; return the runs that have ended."""
        ended: list[PointResult] = []
        if self.queue is not None and self.queue.running:
            result = self.queue.wait_one(POLL_S)
            ended += [result] if result is not None else []
        else:
            time.sleep(FOLLOW_S)
        if not self.followed or time.monotonic() < self._next_poll:
            return ended
        run_statuses = statuses(RunDir(task.run.path) for task in self.followed)[0]
        kinds = {task.point.config.cluster.kind for task in self.followed}
        self._next_poll = time.monotonic() + max(class_of(kind).status_interval_s for kind in kinds)
        pairs = list(zip(self.followed, run_statuses, strict=True))
        over = [task for task, status in pairs if self._is_over(task, status)]
        self.followed = [task for task in self.followed if task not in over]
        self._full = self._full and not over
        return ended + [PointResult(task=task, exit_code=0) for task in over]

    def _is_over(self, task: PointTask, status: RunStatus) -> bool:
        """Return whether a run has ended, or could not be read for as long as a file of a network
        file system may be out of reach.
        """
        if status.state not in UNREADABLE:
            self._unreadable_since.pop(task.run.path, None)
            return status.state in OVER
        now = time.monotonic()
        return now - self._unreadable_since.setdefault(task.run.path, now) >= READ_PATIENCE_S

    def stop(self, task: PointTask) -> None:
        """Stop a run at its next boundary, if its scheduler answers."""
        if task not in self.followed:
            assert self.queue is not None  # noqa: S101
            self.queue.cancel(task)
            return
        try:
            cancel(task.run)
        except ClusterError as error:
            self._output.note(f"not stopped: {error}", "yellow")


@dataclass(kw_only=True, slots=True)
class Trial:
    """A trial whose run is in progress or waits.

    Attributes:
        reported: the last update whose objective Optuna knows.
        verdict: why it is to be pruned, as soon as its folder can be written.
        pruned: why it was asked to stop; a run that ends before it is has a value all the same.
    """

    number: int
    task: PointTask
    metrics: Tail
    reported: int = -1
    verdict: str = ""
    pruned: str = ""


"""Prefix of the figures of a job's evaluation. `loss` alone is the training's."""


class Objective:
    """The figure that a search optimises.

    Args:
        setting: `sweep.objective`.

    Attributes:
        name: its full name; "auto" until the first evaluation, or the end of a trial, tells
            whether the job evaluates a loss.
    """

    def __init__(self, setting: str) -> None:
        whole = setting in ("auto", "loss", "seconds") or setting.startswith(HELD_OUT)
        self.setting, self.name = setting, setting if whole else HELD_OUT + setting

    def refusal(self, evaluation: Mapping[str, Any]) -> str:
        """Return why a job with these held-out figures cannot be judged by it; "" if it can.

        >>> Objective("acuracy").refusal({"accuracy": 0.5})
        "sweep.objective=acuracy: the job does not evaluate it; did you mean 'held_out.accuracy'?"
        """
        names = [HELD_OUT + name for name in evaluation]
        if self.name == "auto":
            if names and HELD_OUT + "loss" not in names:
                return (
                    f"sweep.objective is not set, and the job evaluates {', '.join(names)}, but no "
                    f"loss: add sweep.objective={names[0]} with sweep.direction=maximize or "
                    "minimize, or sweep.objective=loss for the training's"
                )
            self.name = HELD_OUT + "loss" if names else "loss"
        if not self.name.startswith(HELD_OUT) or self.name in names:
            return ""
        known = [*names, "loss", "seconds"]
        hint = did_you_mean(self.name, known)
        return f"sweep.objective={self.setting}: the job does not evaluate it{hint}"

    def of_record(self, record: Mapping[str, Any]) -> float | None:
        """Return its value in a line of metrics.jsonl; None where that has none."""
        if self.name.startswith(HELD_OUT):
            return _number((record.get("evaluation") or {}).get(self.name.removeprefix(HELD_OUT)))
        return _number(record.get(self.name))

    def of_result(self, result: Mapping[str, Any]) -> float | None:
        """Return its value in result.json."""
        if self.name.startswith(HELD_OUT):
            return _number((result.get("metrics") or {}).get(self.name.removeprefix(HELD_OUT)))
        return _number(result.get(self.name))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _has_ended(task: PointTask) -> bool:
    """Return whether the run of a trial needs no further start."""
    return task.action is Action.NOTHING or task.state == "failed"


def _statuses_of(tasks: Sequence[PointTask]) -> dict[Path, RunStatus]:
    """Return the statuses of the tasks' runs by their folders, with one query for all."""
    if not tasks:
        return {}
    run_statuses, _ = statuses([task.run for task in tasks])
    return {task.run.path: status for task, status in zip(tasks, run_statuses, strict=True)}


class Searcher:
    """One start of a search: draws trials, runs them and records their results in the study."""

    def __init__(self, search: Search, runs: TrialRuns, output: OutputOptions) -> None:
        self._search, self._runs, self._output = search, runs, output
        self._study, self._storage = open_study(search)
        self._pruner = MedianPruner() if search.sweep.prune == "median" else None
        self._running: dict[Path, Trial] = {}
        self._waiting: list[Trial] = []
        self._folders: dict[int, Path] = {}
        self._newest: PointTask | None = None
        self._objective = Objective(search.objective)
        self._gave_up_waiting = False  # the records of the last trial that ended were out of reach
        self.table: dict[str, Any] = {}

    def run(self, overrides: Sequence[str] = ()) -> None:
        """Run to the end of the last trial, or to an interrupt.

        Args:
            overrides: to resume with, of which trials in progress are warned.

        Raises:
            ConfigError: earlier trials were of other code, or none has measured the objective.
        """
        self._find_earlier_trials()
        if overrides and (busy := sorted(trial.number for trial in self._running.values())):
            named = f"{named_numbers('trial', busy)} of {self._search.folder}"
            text = f"warning: {named} cannot take {' '.join(overrides)} while in progress"
            say(self._output.console, text, "yellow", prose=True)
        self._write_table()
        while True:
            if not interrupts.count:
                self._start_waiting()
                self._draw_trials()
            if not self._runs.running:
                break
            ended = self._runs.wait()
            # Together: a scheduler that does not answer is awaited once, not for each run.
            run_statuses = _statuses_of([result.task for result in ended if not result.refusal])
            for result in ended:
                self._end(result, run_statuses.get(result.task.run.path))
            for trial in list(self._running.values()):
                if not trial.pruned:
                    self._follow(trial)

    def _trials(self) -> Sequence[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _find_earlier_trials(self) -> None:
        points: dict[int, Point] = {}
        seen: set[tuple[Any, ...]] = set()
        for trial in self._trials():
            params = tuple(trial.params.items())
            if params in seen:
                continue
            seen.add(params)
            try:
                points[trial.number] = self._search.point(trial.number, trial.params)
            except UsageError as error:
                if trial.state is TrialState.RUNNING:  # killed before it could write that
                    self._tell(trial.number, TrialState.FAIL, str(error))
        tasks = dict(zip(points, tasks_of([*points.values()]), strict=True)) if points else {}
        self._folders = {n: task.run.path for n, task in tasks.items() if task.run.config.exists()}
        trials = self._trials()
        changed = {
            number: task.changed
            for number, task in tasks.items()
            if trials[number].state is not TrialState.FAIL and task.changed
        }
        if changed:  # trials that count are of other code or data
            raise ConfigError(
                f"{named_numbers('trial', sorted(changed))} of {self._search.folder} cannot be "
                f"compared with what would run now (changed: {next(iter(changed.values()))}); "
                f"choose another run.dir, or begin the search anew with sweep.force=true"
            )
        trials = self._trials()
        unfinished = {n: t for n, t in tasks.items() if trials[n].state is TrialState.RUNNING}
        over = [task for task in unfinished.values() if _has_ended(task)]
        run_statuses = _statuses_of(over)
        for number, task in unfinished.items():
            self._take_up(number, task, run_statuses.get(task.run.path))

    def _take_up(self, number: int, task: PointTask, status: RunStatus | None = None) -> None:
        """Follow, evaluate or start a trial that has no result yet, as its folder requires.

        Args:
            status: of its run, where it is known.
        """
        self._newest = task
        reported = max(self._trials()[number].intermediate_values, default=-1)
        trial = Trial(number=number, task=task, metrics=Tail(task.run.metrics), reported=reported)
        trial.pruned = (read_json(task.run.pruned) or {}).get("why", "")
        if task.action is Action.IN_PROGRESS:
            if task.run.cancel.exists() and not trial.pruned:
                raise RunFolderError(
                    f"{task.run.path} is being stopped; type the same again once it has ended"
                )
            self._running[task.run.path] = trial
            self._runs.follow(task)
        elif trial.pruned and task.action is not Action.NOTHING:
            self._tell(number, TrialState.PRUNED, trial.pruned)
        elif _has_ended(task):
            self._evaluate(trial, status)
        else:
            self._waiting.append(trial)

    # Trials begin.

    def _start_waiting(self) -> None:
        while self._waiting and self._runs.has_room(self._waiting[0].task):
            trial = self._waiting[0]
            path = trial.task.run.path
            # Recorded first, since the run's folder appears while it starts.
            self._folders[trial.number], self._running[path] = path, trial
            try:
                started, refusal = self._runs.start(trial.task), ""
            except ConfigError as error:
                started, refusal = False, str(error)
            if started or refusal:
                self._waiting.pop(0)
            if started:
                chosen = trial.task.point.overrides[len(self._search.space.fixed) :]
                self._output.note(f"trial {trial.number} begins: {' '.join(chosen)}", "dim")
                continue
            del self._running[path]
            if not trial.task.run.config.exists():
                del self._folders[trial.number]
            if not refusal:  # the room was taken meanwhile
                return
            self._tell(trial.number, TrialState.FAIL, refusal)

    def _draw_trials(self) -> None:
        """Draw trials as long as there is room for one like the newest."""
        while not self._waiting and len(trials := self._trials()) < self._search.trials:
            if self._newest is not None and not self._runs.has_room(self._newest):
                return
            number, drawn = len(trials), self._search.space.draw(self._search.sweep, trials)
            same = [f"the same as trial {t.number}" for t in trials if t.params == drawn]
            trial = create_trial(
                state=TrialState.PRUNED if same else TrialState.RUNNING,
                params=drawn,
                distributions=self._search.space.distributions,
                user_attrs={WHY: same[0]} if same else {},
            )
            self._study.add_trial(trial)
            if not same:
                try:
                    point = self._search.point(number, drawn)
                    notes = notes_of(point.config, point.point_key)
                except UsageError as error:
                    self._tell(number, TrialState.FAIL, str(error))
                else:
                    task = PointTask(point=point, action=Action.START, state="new", notes=notes)
                    self._take_up(number, task)
                    self._start_waiting()
            self._write_table()

    # Trials end.

    def _follow(self, trial: Trial) -> None:
        """Read a trial's new measurements; prune it where it is worse than others.

        Raises:
            ConfigError: the job does not measure the objective.
        """
        if trial.verdict:
            self._prune(trial, again=True)
            return
        for update in self._report(trial):
            frozen = self._trials()[trial.number]
            if self._pruner is not None and self._pruner.prune(self._study, frozen):
                why = f"worse after update {update + 1} than the median of those before it"
                trial.verdict = why
                self._prune(trial)
                break

    def _prune(self, trial: Trial, *, again: bool = False) -> None:
        """Note why a trial is pruned, and stop it; in a later turn if that cannot be noted now."""
        try:
            write_json(trial.task.run.pruned, {"why": trial.verdict})
        except OSError as error:
            if not is_unreadable_now(error):
                raise
            if not again:
                text = f"{error}; trial {trial.number} is stopped once its folder can be written"
                self._output.note(text, "yellow", prose=True)
            return
        trial.pruned = trial.verdict
        self._runs.stop(trial.task)

    def _report(self, trial: Trial, *, last: bool = False) -> Iterator[int]:
        """Report new values of the objective to Optuna, and yield the updates they are of."""
        for record in self._last_records(trial) if last else self._new_records(trial):
            if evaluation := record.get("evaluation"):
                self._check_objective(trial, evaluation)
            value = self._objective.of_record(record)
            if self._pruner is None or value is None or not math.isfinite(value):
                continue
            update = record.get("update", -1)
            if update > trial.reported and is_judged(update + 1):  # not one that is redone
                trial.reported = update
                trial_id = self._id(trial.number)
                self._storage.set_trial_intermediate_value(trial_id, update, value)
                yield update

    def _new_records(self, trial: Trial) -> Iterator[Record]:
        """Yield a trial's new records; those that cannot be read for now come in a later turn.

        A trial that stays unreadable ends all the same, see `TrialRuns`.
        """
        with contextlib.suppress(OSError, RunFolderError):
            for _, record in trial.metrics.lines():
                yield record

    def _last_records(self, trial: Trial) -> list[Record]:
        """Return the rest of an ended trial's records. There is no later turn, so a file that
        cannot be read is awaited for some time, or until an interrupt; in an outage that
        outlasts this for one trial, not for those that end after it.
        """
        records: list[Record] = []  # of all tries: the next one reads on after them

        def read() -> None:
            try:
                records.extend(record for _, record in trial.metrics.lines())
            except (OSError, RunFolderError):
                if not interrupts.count:  # which running trials do not get while this waits
                    raise

        note = partial(self._output.note, style="yellow", prose=True)
        try:
            if self._gave_up_waiting:
                read()
            else:
                await_readable(read, note)
        except (OSError, RunFolderError):
            self._gave_up_waiting = True
        else:
            self._gave_up_waiting = False
        return records

    def _check_objective(self, trial: Trial, evaluation: Mapping[str, Any]) -> None:
        """Refuse an objective that the job does not evaluate, at its first evaluation.

        Raises:
            ConfigError: and no earlier trial has measured it. All trials have stopped.
        """
        why = self._objective.refusal(evaluation)
        if why and not any(t.state is TrialState.COMPLETE for t in self._trials()):
            self._give_up(trial, why)

    def _give_up(self, trial: Trial, why: str) -> NoReturn:
        """End all trials at their next boundaries, and the search."""
        for other in self._running.values():
            self._runs.stop(other.task)
        while self._runs.running and not interrupts.count:
            self._runs.wait()
        self._tell(trial.number, TrialState.FAIL, why)
        raise ConfigError(why)

    def _end(self, ended: PointResult, status: RunStatus | None) -> None:
        trial = self._running.pop(ended.task.run.path)
        result = None
        with contextlib.suppress(RunFolderError):  # its state says that it cannot be read
            result = None if ended.refusal else trial.task.run.read_result()
        finished = result is not None and result["state"] == "finished"
        if trial.pruned and not finished:
            self._tell(trial.number, TrialState.PRUNED, trial.pruned)
        elif finished or not interrupts.count:  # else the next start resumes it
            self._evaluate(trial, status, ended.refusal)

    def _evaluate(self, trial: Trial, status: RunStatus | None, refusal: str | None = None) -> None:
        """Record the value of a trial whose run is over, or why it has none; follow it again if it
        is in progress all the same.

        Args:
            status: of its run, where it is known.
        """
        value = None
        why = refusal
        if not why:
            status = status or _statuses_of([trial.task])[trial.task.run.path]
            if status.state not in (*OVER, *UNREADABLE):
                self._running[trial.task.run.path] = trial
                self._runs.follow(trial.task)
                return
            failed = status.state == "failed"
            culprit = (trial.task.run.read_result() or {}).get("culprit") if failed else None
            if culprit:
                why = describe_culprit(culprit)
            elif status.state != "finished":
                why = status.reason or f"it was {status.state}"
        if not why:
            result = trial.task.run.read_result() or {}
            why = self._objective.refusal(result.get("metrics") or {})
            value = None if why else self._objective.of_result(result)
            if not why and value is None:
                why = f"sweep.objective={self._objective.setting}: it measured no such figure"
            if why and not any(t.state is TrialState.COMPLETE for t in self._trials()):
                self._give_up(
                    trial, f"{why}; if other trials will, the same line goes on with them"
                )
            if value is not None and not math.isfinite(value):
                why = f"its {self._objective.name} is {value}"
        if why:
            self._tell(trial.number, TrialState.FAIL, why)
            return
        for _ in self._report(trial, last=True):
            pass  # the rest, for others to be compared with
        self._tell(trial.number, TrialState.COMPLETE, value=value)

    def _tell(
        self, number: int, state: TrialState, why: str = "", value: float | None = None
    ) -> None:
        """Record how a trial ended, and show it."""
        if why:
            self._storage.set_trial_user_attr(self._id(number), WHY, why)
        self._study.tell(number, value, state)
        self._write_table()
        self._output.note(describe_trial(self.table, number))

    def _id(self, number: int) -> int:
        study_id = self._storage.get_study_id_from_name(STUDY)
        return self._storage.get_trial_id_from_study_id_trial_number(study_id, number)

    def _write_table(self) -> None:
        """Write search.json."""
        search = self._search
        trials: list[dict[str, Any]] = []
        for trial in self._trials():
            folder = self._folders.get(trial.number)
            trials.append(
                {
                    "number": trial.number,
                    "state": STATES.get(trial.state.name, "open"),
                    "value": trial.value if trial.state is TrialState.COMPLETE else None,
                    "point": [a.text(trial.params[a.key]).lstrip("+") for a in search.space.axes],
                    "folder": folder.name if folder is not None else None,
                    "why": trial.user_attrs.get(WHY),
                }
            )
        sign = -1 if search.maximize else 1
        known = [(sign * row["value"], row["number"]) for row in trials if row["value"] is not None]
        line = search.composer.line
        self.table = {
            "search": search.sweep.search,
            "objective": self._objective.name,
            "maximize": search.maximize,
            "wanted": search.trials,
            "trials": trials,
            "best": min(known)[1] if known else None,
            "line": {
                "overrides": list(line.overrides),
                "config_dir": line.config_dir and str(expand_user(line.config_dir).absolute()),
                "config_name": line.config_name,
                "folder": str(Path.cwd()),
            },
        }
        write_json(RunDir(search.folder).search, self.table)


def is_judged(updates: int) -> bool:
    """Return whether a trial is judged after this many updates.

    The numbers have two digits, and zeros behind. So any two trials are judged after the same
    ones, and a long one at most 90 times a decade.

    >>> [n for n in (7, 99, 101, 110, 1010, 1100) if is_judged(n)]
    [7, 99, 110, 1100]
    """
    return updates % 10 ** max(0, len(str(updates)) - 2) == 0


def run_search(composer: Composer, output: OutputOptions, overrides: Sequence[str] = ()) -> int:
    """Run trials until there are as many as the line asks for; print them.

    Args:
        overrides: to resume with.

    Returns:
        The exit code: 0 once one trial has a value, whatever became of others.

    Raises:
        ConfigError: what cannot be searched, or not in this folder.
        RunFolderError: another command is at work in it, or it is damaged.
    """
    search = Search(composer)
    with locked_sweep(search.folder):
        runs = TrialRuns(search, output)
        with runs.queue or interrupts:  # after the first interrupt nothing more starts
            searcher = Searcher(search, runs, output)
            tell_begun(search.folder, RunDir(search.folder).sweep_log)
            searcher.run(overrides)
            count, active = interrupts.count, len(runs.followed)
        print_search(searcher.table, output.console)
        say(output.console, f"the search's folder: {search.folder}")
        states = [trial["state"] for trial in searcher.table["trials"]]
        if "open" in states or len(states) < search.trials:
            if active:
                go = "goes on by itself" if active == 1 else "go on by themselves"
                end = (
                    f"to end {'it' if active == 1 else 'them'}: {command('cancel', search.folder)}"
                )
                say(output.console, f"{plural(active, 'trial')} {go}; {end}", "bold")
            say(output.console, f"to go on: {command('resume', search.folder)}", "bold")
            return EXIT_INTERRUPTED if count > 1 else EXIT_STOPPED
        return EXIT_FINISHED if "complete" in states else EXIT_FAILED


def resume_search(
    folder: Path,
    output: OutputOptions,
    overrides: Sequence[str] = (),
    config_dir: str | None = None,
) -> int:
    """Continue a search from its folder alone: see `SearchMethod.resume`."""
    check_overrides(overrides, verb="resume")
    search = RunDir(folder)
    line: dict[str, Any] = (search.read_search() or {}).get("line") or {}
    if not line:
        raise RunFolderError(f"{search.search} does not say which line the search is of")
    keys = {key_of(override) for override in (*overrides, "run.dir=", "sweep.force=")}
    inherited = [override for override in line["overrides"] if key_of(override) not in keys]
    resumed = CommandLine(
        overrides=(*inherited, *overrides, f"run.dir={quote_for_hydra(str(folder))}"),
        config_dir=line["config_dir"] if config_dir is None else str(stated_folder(config_dir)),
        config_name=line["config_name"],
        multirun=True,
    )
    with submission_directory(search, Path(line["folder"])):
        composer = Composer(resumed)
        composer.compose()
        return run_search(composer, output, overrides)
