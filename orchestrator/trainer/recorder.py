"""The record of a run: metrics.jsonl, lines in a log, trackers."""

from __future__ import annotations

import importlib.util
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from orchestrator.client.checkpoint_manager import CheckpointManager
from orchestrator.client.loop import Callback, CompletedUpdate, update_line
from orchestrator.config.reading import NoOptions, options_of
from orchestrator.config.schema import Config, TrackerConfig
from orchestrator.engine.api import Engine
from orchestrator.engine.common.waiting import declared
from orchestrator.errors import ConfigError, OrchestratorError, RunFolderError
from orchestrator.plan.window import Window
from orchestrator.plugins import TRACKERS
from orchestrator.rundir.files import LineFile
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import ProgressWriter
from orchestrator.rundir.outcome import State
from orchestrator.rundir.warnings import NewWarnings, warn
from orchestrator.units import format_learning_rate, format_number, format_rate

# ----------------------------------------------------------------------
# Lines about training in rank 0's log, which `logs RUN -f` shows.


def log_update(done: CompletedUpdate, total: int) -> None:
    """Log an update, of `total` planned ones."""
    rate = f"  {format_rate(done.window.samples / done.seconds)}" if done.seconds > 0 else ""
    _log(
        f"update {done.window.update + 1}/{total}  loss {format_number(done.report.loss)}  "
        f"learning rate {format_learning_rate(done.window.learning_rate)}{rate}"
    )


def log_evaluation(update: int, figures: Mapping[str, float]) -> None:
    """Log held-out figures after an update (from 0)."""
    values = ", ".join(f"{name} {format_number(value)}" for name, value in figures.items())
    if values:
        _log(f"held-out after update {update + 1}: {values}")


def _log(line: str) -> None:
    try:
        print(line, flush=True)
    except OSError:  # a full disk, which the missing lines of metrics.jsonl are warned of
        return


# ----------------------------------------------------------------------
# Trackers, and a wrapper that keeps their errors from ending a training.


class Tracker(ABC):
    """Base of the trackers, for one attempt on rank 0. Packages add kinds: `orchestrator.trackers`.

    The first error is reported, and the tracker is not called again in that attempt. The training
    waits while it writes.

    Attributes:
        Options: a dataclass of what `tracker.options` may hold.
        title: of what it writes, for messages.
        requires: a module that it imports, and the package to install for it.
        state: how the attempt ended; set before `close`.
    """

    Options: ClassVar[type] = NoOptions
    title: str = "the output of tracker.kind"
    requires: tuple[str, str] | None = None
    state: State = State.FINISHED

    def __init__(self, run: RunDir, config: Config) -> None:
        """Prepare to write. Raise `ConfigError` for invalid options, which ends the run."""
        self.run, self.config = run, config
        self.options = options_of(self.Options, config.tracker.options, "tracker.options")

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars of update `step`, from 0. After a resume a step may come twice."""

    def close(self) -> None:  # most have nothing to end
        """Nothing follows in this attempt."""


def check_tracker(kind: str) -> None:
    """Raise `ConfigError` where the package of a tracker is missing: any rank may become the one
    that records. Of the default `Scalars` warns: it may not have been chosen.
    """
    if kind != TrackerConfig.kind and (package := _missing_package(kind)):
        raise ConfigError(
            f"tracker.kind={kind} writes with a package that is not installed; pip install "
            f"{package}, or tracker=none"
        )


def _missing_package(kind: str) -> str | None:
    """Return what has to be installed for a tracker; None if nothing has to."""
    requires = None if kind in TRACKERS.besides else TRACKERS.load(kind, Tracker).requires
    if requires is None or importlib.util.find_spec(requires[0]) is not None:
        return None
    return requires[1]


_TRACKS = "it waits for its tracker"


class Scalars:
    """Rank 0's tracker, whose errors do not end the training. Raises `ConfigError`."""

    def __init__(self, run: RunDir, config: Config) -> None:
        kind = config.tracker.kind
        self._tracker: Tracker | None = None
        if kind == TrackerConfig.kind and (package := _missing_package(kind)):
            warn(
                f"tracker.kind={kind}, the default, writes with a package that is not installed, "
                f"so metrics.jsonl alone has the scalars; pip install {package}, or tracker=none"
            )
            return
        try:
            with declared(_TRACKS):
                self._tracker = (
                    None if kind == "none" else TRACKERS.make(kind, Tracker, run, config)
                )
        except OrchestratorError:
            raise
        except Exception as error:  # noqa: BLE001  # a server that does not answer, say
            self._give_up(f"tracker={kind} could not start", error)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._try(lambda tracker: tracker.write(step, values))

    def close(self, state: State) -> None:
        def close(tracker: Tracker) -> None:
            tracker.state = state
            tracker.close()

        self._try(close)

    def _try(self, write: Callable[[Tracker], None]) -> None:
        """Write, unless the tracker failed before: it need not work after an error."""
        tracker = self._tracker
        if tracker is None:
            return
        try:
            with declared(_TRACKS, brief=True):
                write(tracker)
        except Exception as error:  # noqa: BLE001  # said, and no reason to end a training
            self._give_up(f"{tracker.title} could not be written", error)

    def _give_up(self, what: str, error: Exception) -> None:
        self._tracker = None
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        warn(
            f"{what}: {why}; the tracker is off for the rest of this attempt, and metrics.jsonl "
            f"has all of it"
        )


# ----------------------------------------------------------------------
# The callback that writes all of this.


class Recorder(Callback):
    """Rank 0's record: metrics.jsonl, scalars, its log, its progress in the current window.

    A line of metrics.jsonl is one `write`, so a reader sees whole lines but the last. A full disk
    never ends a training: lines wait for room. Only at the end (`close`) does it matter.

    Attributes:
        scalars: the tracker, which is closed later, once the end is known.
        note: goes with the next update's line, once.
        traffic: of the next evaluation, for its line.
        generation: of the attempt's newest recorded change.
    """

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        config: Config,
        engine: Engine,
        checkpoints: CheckpointManager,
        updates: int,
    ) -> None:
        self._attempt, self._engine, self._checkpoints = attempt, engine, checkpoints
        self._metrics = LineFile(run.metrics)
        self._progress = ProgressWriter(run.progress(attempt))
        self.scalars = Scalars(run, config)
        self.note: dict[str, Any] = {}
        self.traffic: dict[str, int] = {}
        self.generation = 0
        self._warnings = NewWarnings(run.attempt(attempt))  # of all ranks
        self._update, self._updates = 0, updates

    def on_micro_step(self, update: int, done: int, steps: int) -> None:
        self._progress.write(update, done, steps)

    def on_boundary(self, done: CompletedUpdate) -> None:
        window, report = done.window, done.report
        self._update = window.update
        for name, value in report.metrics.items():  # `train.on_non_finite` is for the loss
            if not math.isfinite(value):
                warn(
                    f"metric '{name}' is {value} in update {report.update}: a sum in Loss.metrics "
                    "was not finite, on some rank in some micro-step",
                    kind=f"metric {name}",
                )
        line = update_line(done, self._engine.peak_memory_bytes())
        self._line(line | self.note | self._warned())
        self.note = {}
        log_update(done, self._updates)
        self.scalars.write(
            window.update,
            {
                "train/loss": report.loss,
                "train/learning_rate": window.learning_rate,
                "time/update_s": done.seconds,
                **{f"train/{name}": value for name, value in report.metrics.items()},
            },
        )

    def record_changes(self, changes: Iterable[Mapping[str, Any]], updates: int) -> None:
        """Write changes of the group that no line has, of which the last led to this group, after
        so many updates.
        """
        for change in changes:
            if change["generation"] > self.generation:
                self.generation = change["generation"]
                self._line({"update": updates, "time": time.time(), **change})

    def on_evaluation(self, window: Window, figures: dict[str, float]) -> None:
        update = window.update
        self._line(
            {
                "evaluation": figures,
                "update": update,
                "epoch": window.epoch,
                "time": time.time(),
                **self.traffic,
            }
        )
        log_evaluation(update, figures)
        self.scalars.write(update, {f"evaluation/{name}": value for name, value in figures.items()})

    def close(self, *, finished: bool) -> None:
        """Write down what was warned of after the last boundary, in a line of its own.

        Args:
            finished: nothing comes later, so that what is not written now never will be.

        Raises:
            RunFolderError: it is finished, but its last checkpoint or its metrics are not written.
        """
        self._checkpoints.wait()
        if late := self._warned(now=True):
            self._line({"update": self._update, "time": time.time(), **late})
        unwritten = self._checkpoints.unsaved
        try:
            self._metrics.close()
        except OSError as error:
            unwritten = unwritten or f"metrics.jsonl could not be written: {error.strerror}"
        if finished and unwritten:
            raise RunFolderError(f"trained to the end, but {unwritten}; make room, and resume")

    def _warned(self, *, now: bool = False) -> dict[str, list[str]]:
        sentences = self._warnings.read(now=now)
        return {"warnings": sentences} if sentences else {}

    def _line(self, record: Mapping[str, Any]) -> None:
        waited = self._metrics.waiting
        try:
            self._metrics.write(json.dumps({**record, "attempt": self._attempt}))
        except OSError as error:
            warn(
                f"metrics.jsonl could not be written: {error.strerror}; its lines are kept, and "
                f"follow as soon as there is room",
                kind="metrics not written",
            )
            return
        if waited:
            lost = f", {self._metrics.lost} had to be given up" if self._metrics.lost else ""
            warn(f"there is room again: {waited} lines of metrics.jsonl that waited follow{lost}")
