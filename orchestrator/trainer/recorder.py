"""Rank 0's record of a run: metrics.jsonl, checkpoints, lines of its log, trackers, the result."""

from __future__ import annotations

import json
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, cast

from orchestrator.client.loop import update_line
from orchestrator.config.reading import NoOptions, options_of
from orchestrator.config.schema import Config
from orchestrator.engine.api import BoundaryReport, Engine
from orchestrator.errors import ConfigError, RunFolderError
from orchestrator.plan.plan import Plan
from orchestrator.plugins import TRACKERS
from orchestrator.rundir import checkpoints as checkpoint
from orchestrator.rundir.checkpoints import Saves
from orchestrator.rundir.files import LineFile
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import CHANGES, ProgressWriter, read_metrics
from orchestrator.rundir.warnings import NewWarnings, warn
from orchestrator.trainer.consistency_checks import UpdateTime
from orchestrator.trainer.loop import Callback, Done, Outcome
from orchestrator.units import format_learning_rate, format_number, format_rate

# ----------------------------------------------------------------------
# Changes of the group: lost ranks and replacements. Each is a line of metrics.jsonl.

Change = dict[str, Any]


def change_of(
    gone: Sequence[int],
    came: Sequence[int],
    facts: Mapping[str, Any],
    lost_updates: int | None,
    *,
    redone: bool,
) -> Change:
    """Return one change as `survived` and `joined`, as it is recorded.

    Args:
        gone, came: ranks.
        facts: of the new group.
        lost_updates: that a lost part of the state takes back; None: no part is lost.
        redone: an update was under way, and is begun again.
    """
    change: Change = {"generation": facts["generation"]}
    if came:
        change["joined"] = {**facts, "came": list(came)}
    if gone:
        back = {} if lost_updates is None else {"lost_updates": lost_updates}
        ended = {} if redone else {"redone": 0}
        change["survived"] = {**facts, "gone": list(gone), **back, **ended}
    return change


# ----------------------------------------------------------------------
# Checkpoints written in the background, one at a time, or at once.


class Kept(Saves, Protocol):
    """Copy of a state, which training does not change; see `Engine.snapshot`."""

    def take(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A checkpoint that was written after so many updates, or why it was not."""

    updates: int
    seconds: float
    error: Exception | None


class Saving:
    """Rank 0's.

    Args:
        background: by a thread, from a copy. A checkpoint that is due waits for the one before it:
            where a disk is slower than the training, the training has the disk's pace, as it has
            without a thread, and no checkpoint is left out.

    Raises:
        ConfigError: the engine gives no copies of its state.
    """

    def __init__(self, engine: Engine, *, background: bool) -> None:
        if background and not hasattr(engine, "snapshot"):
            raise ConfigError(
                "train.checkpoint_in_background=true is not available with this engine, which "
                f"gives no copy of its state ({type(engine).__name__}); leave it out"
            )
        self._engine, self._background = engine, background
        self._thread: threading.Thread | None = None
        self._written: Written | None = None

    def begin(self, updates: int, write: Callable[[Saves], object]) -> None:
        """Write a checkpoint. What came of the one before has to be taken first (`ended`).

        Args:
            write: does it, from what it is given.
        """
        if not self._background:
            self._run(updates, lambda: write(self._engine))
            return
        kept: Kept = cast("Any", self._engine).snapshot()

        def write_kept() -> None:
            kept.take()
            write(kept)

        self._thread = threading.Thread(
            target=self._run, args=(updates, write_kept), name="checkpoint", daemon=True
        )
        self._thread.start()

    def _run(self, updates: int, write: Callable[[], object]) -> None:
        began, failed = time.monotonic(), None
        try:
            write()
        except Exception as error:  # noqa: BLE001  # raised, or warned of, by the main thread
            failed = error
        self._written = Written(updates=updates, seconds=time.monotonic() - began, error=failed)

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def ended(self, *, wait: bool) -> Written | None:
        """Return how the latest checkpoint ended, once; None while it is written and without one.

        Args:
            wait: until it is written.
        """
        if self._thread is not None and (wait or not self._thread.is_alive()):
            self._thread.join()
            self._thread = None
        if self._thread is not None:
            return None
        written, self._written = self._written, None
        return written


# ----------------------------------------------------------------------
# Lines about training in rank 0's log, which `logs RUN -f` shows.

SHORTEST_S = 1.0
LONGEST_S = 60.0
LINES = 200  # about so many while the interval grows by a given factor


class UpdateLines:
    """One attempt's.

    Args:
        total: updates that are planned.
        clock: in seconds.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._clock = total, clock
        self._began = self._last = clock()
        self._samples = 0
        self._first = True
        self._evaluated = -LONGEST_S

    def _interval_s(self, now: float) -> float:
        return min(LONGEST_S, max(SHORTEST_S, (now - self._began) / LINES))

    def update(self, update: int, *, loss: float, learning_rate: float, samples: int) -> None:
        """Log an update (from 0) now and then; always the first and the last one."""
        now = self._clock()
        self._samples += samples
        since = now - self._last
        if not (self._first or update + 1 == self._total or since >= self._interval_s(now)):
            return
        rate = f"  {format_rate(self._samples / since)}" if since > 0 else ""
        self._first, self._samples, self._last = False, 0, now
        _log(
            f"update {update + 1}/{self._total}  loss {format_number(loss)}  "
            f"learning rate {format_learning_rate(learning_rate)}{rate}"
        )

    def evaluation(self, update: int, figures: Mapping[str, float]) -> None:
        """Held-out figures after an update (from 0); as seldom as updates, but for the last."""
        now = self._clock()
        if update + 1 < self._total and now - self._evaluated < self._interval_s(now):
            return
        self._evaluated = now
        values = ", ".join(f"{name} {format_number(value)}" for name, value in figures.items())
        if values:
            _log(f"held-out after update {update + 1}: {values}")


def _log(line: str) -> None:
    try:
        print(line, flush=True)
    except OSError:  # a full disk, which the missing lines of metrics.jsonl are warned of
        return


# ----------------------------------------------------------------------
# What rank 0 writes into result.json when a run ends well, or is stopped.


def memory_of_ranks(engine: Engine) -> dict[str, list[int]]:
    """Bytes by what they are for, and their peak, a number for each rank. Collective."""
    mine = {**engine.memory_bytes(), "peak": engine.peak_memory_bytes()}
    rows = engine.gather([float(size) for size in mine.values()])
    return {name: [int(row[place]) for row in rows] for place, name in enumerate(mine)}


def result_of(
    run: RunDir,
    outcome: Outcome,
    engine: Engine,
    planned: Plan,
    *,
    seconds: float,
    memory: dict[str, list[int]],
) -> dict[str, Any]:
    """Return the values of result.json.

    Args:
        memory: of all ranks; `memory` in the result is that of the largest, in bytes.
    """
    recorded = read_metrics(run.metrics)
    history = recorded.updates  # of all attempts
    changes = {key: [line[key] for line in recorded.changes if key in line] for key in CHANGES}
    outcome.collectives = sum(record.get("collectives", 0) for record in history)
    outcome.bytes_on_wire = sum(record.get("bytes_on_wire", 0) for record in history)
    return {
        "state": outcome.state,
        "updates": outcome.updates,
        "samples": outcome.samples,
        "loss": outcome.loss,
        "metrics": outcome.evaluation,
        "optimizer": engine.optimizer_used(),
        "weights_sha256": engine.weights_sha256(),
        "peak_memory_bytes": memory["peak"],
        "memory": {name: max(sizes) for name, sizes in memory.items()},
        "collectives": outcome.collectives,
        "bytes_on_wire": outcome.bytes_on_wire,
        "seconds": seconds,
        "planned_updates": planned.updates,
        "planned_collectives_per_update": planned.traffic.collectives,
        "culprit": None,
        "restarts": run.restarts(),
        **{key: notes for key, notes in changes.items() if notes},
    }


# ----------------------------------------------------------------------
# Trackers, and a wrapper that keeps their errors from ending a training.


class Tracker(ABC):
    """One attempt's, on rank 0. Somebody else's is found through `orchestrator.trackers`.

    What it raises is said once, and then it is left alone for the rest of the attempt. The training
    waits while it writes.

    Attributes:
        Options: a dataclass of what `tracker.options` may hold.
        title: of what it writes, for messages.
    """

    Options: ClassVar[type] = NoOptions
    title: str = "what tracker.kind wants"

    def __init__(self, run: RunDir, config: Config) -> None:
        """Prepare to write. Raise `ConfigError` for invalid options, which ends the run."""
        self.run, self.config = run, config
        self.options = options_of(self.Options, config.tracker.options, "tracker.options")

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars of update `step`, from 0. After a resume a step may come twice."""

    def close(self) -> None:  # most have nothing to end
        """Nothing follows."""


class Scalars:
    """Rank 0's tracker, whose errors do not end the training. Raises `ConfigError`."""

    def __init__(self, run: RunDir, config: Config) -> None:
        kind = config.tracker.kind
        self._tracker = None if kind == "none" else TRACKERS.make(kind, Tracker, run, config)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._try(lambda tracker: tracker.write(step, values))

    def close(self) -> None:
        self._try(lambda tracker: tracker.close())

    def _try(self, write: Callable[[Tracker], None]) -> None:
        """Write, unless the tracker failed before: it need not work after an error."""
        tracker = self._tracker
        if tracker is None:
            return
        try:
            write(tracker)
        except Exception as error:  # noqa: BLE001  # said, and no reason to end a training
            self._tracker = None
            why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            warn(
                f"{tracker.title} could not be written: {why}; no more of them follow in this "
                f"attempt, metrics.jsonl has all of it"
            )


# ----------------------------------------------------------------------
# The callback that writes all of this.


class Progress(Callback):
    """Rank 0's place in the current window, for `status` and for the next attempt."""

    def __init__(self, run: RunDir, attempt: int) -> None:
        self._writer = ProgressWriter(run.progress(attempt))

    def on_micro_step(self, update: int, done: int, steps: int) -> None:
        self._writer.write(update, done, steps)


class Recorder(Callback):
    """Rank 0's record: metrics.jsonl, scalars, lines of its log, checkpoints.

    A line of metrics.jsonl is one `write`, so a reader sees whole lines but the last. A full disk
    never ends a training: lines wait for room, and a checkpoint that cannot be written causes a
    warning; the last good one stays, and the next is tried when it is due. Only at the end
    (`close`) does it matter.
    """

    def __init__(
        self, run: RunDir, attempt: int, config: Config, engine: Engine, updates: int
    ) -> None:
        self._run, self._attempt, self._engine = run, attempt, engine
        self._keep = config.train.keep_checkpoints
        self._saving = Saving(engine, background=config.train.checkpoint_in_background)
        self._save_s = self._waited_s = 0.0
        self._identity = run.identity
        self._metrics = LineFile(run.metrics)
        self._unsaved: str | None = None  # why the latest checkpoint could not be written
        self.progress = Progress(run, attempt)
        self._scalars = Scalars(run, config)
        self.note: dict[str, Any] = {}  # goes with the next update's line, once
        self.generation = 0  # of the attempt's newest recorded change
        self._warnings = NewWarnings(run.attempt(attempt))  # of all ranks
        self._update = -1
        self._pace = UpdateTime(config.facts.update_s)
        self._lines = UpdateLines(updates)

    def on_boundary(self, done: Done) -> None:
        window, report, update_s = done.window, done.report, done.seconds
        self._update = window.update
        self._take_written(wait=False)
        _warn_of_metrics(report)
        self._pace.see(update_s)
        line = {
            "epoch": done.epoch,
            "attempt": self._attempt,
            "learning_rate": window.learning_rate,
            "samples": window.samples,
            "micro_steps": window.steps,
            "peak_memory_bytes": self._engine.peak_memory_bytes(),
        }
        self._line(update_line(report, update_s) | line | self.note | self._warned())
        self.note = {}
        self._lines.update(
            window.update,
            loss=report.loss,
            learning_rate=window.learning_rate,
            samples=window.samples,
        )
        self._scalars.write(
            window.update,
            {
                "train/loss": report.loss,
                "train/learning_rate": window.learning_rate,
                "time/update_s": update_s,
                **{f"train/{name}": value for name, value in report.metrics.items()},
            },
        )

    def record_changes(self, changes: Iterable[Change], updates: int) -> None:
        """Write changes of the group that no line has, of which the last led to this group.

        Args:
            updates: completed before this group's first one.
        """
        for change in changes:
            if change["generation"] > self.generation:
                self.generation = change["generation"]
                self._line(
                    {"update": updates, "time": time.time(), "attempt": self._attempt, **change}
                )

    def on_evaluation(self, done: Done, figures: dict[str, float]) -> None:
        update = done.window.update
        self._line(
            {"evaluation": figures, "update": update, "epoch": done.epoch, "time": time.time(),
             "attempt": self._attempt}
        )  # fmt: skip
        self._lines.evaluation(update, figures)
        self._scalars.write(
            update, {f"evaluation/{name}": value for name, value in figures.items()}
        )

    def can_save(self) -> bool:
        """Return whether rank 0 holds all of the state, so that it can save inside a window."""
        return self._engine.holds_state()

    def on_checkpoint(self, updates: int, samples: int) -> None:
        began = time.monotonic()
        self._take_written(wait=True)
        write = partial(
            checkpoint.save, self._run.checkpoints, updates=updates, samples=samples,
            keep=self._keep, run=self._identity,
        )  # fmt: skip
        self._saving.begin(updates, write)
        self._take_written(wait=False)
        self._waited_s = time.monotonic() - began

    def settle(self) -> None:
        """Return once no checkpoint is being written any more."""
        self._take_written(wait=True)

    @property
    def save_s(self) -> float:
        """Seconds until a checkpoint that is due now is written, estimated from the last one."""
        return max(self._waited_s, self._save_s * (1 + self._saving.running))

    def _take_written(self, *, wait: bool) -> None:
        written = self._saving.ended(wait=wait)
        if written is None:
            return
        self._save_s, error = written.seconds, written.error
        name = f"the checkpoint after update {written.updates}"
        if error is None:
            if self._unsaved is not None:
                warn(f"there is room again: {name} was written")
            self._unsaved = None
            return
        if not isinstance(error, OSError):
            raise error
        self._unsaved = f"{name} could not be written: {error.strerror or error}"
        kept = ", the last good checkpoint is kept" * any(self._run.checkpoints.glob("update-*"))
        warn(f"{self._unsaved}; the run goes on{kept}", kind="checkpoint not written")

    def close(self, *, finished: bool) -> None:
        """Write down what was warned of after the last boundary, in a line of its own.

        Args:
            finished: nothing comes later, so that what is not written now never will be.

        Raises:
            RunFolderError: it is finished, but its last checkpoint or its metrics are not written.
        """
        self.settle()
        if late := self._warned(now=True):
            update = max(0, self._update)
            self._line(
                {"update": update, "time": time.time(), "attempt": self._attempt, **late}
            )  # fmt: skip
        unwritten = self._unsaved
        try:
            self._metrics.close()
        except OSError as error:
            unwritten = unwritten or f"metrics.jsonl could not be written: {error.strerror}"
        self._scalars.close()
        if finished and unwritten:
            raise RunFolderError(f"trained to the end, but {unwritten}; make room, and resume")

    def _warned(self, *, now: bool = False) -> dict[str, list[str]]:
        found = self._warnings.read(now=now)
        return {"warnings": found} if found else {}

    def _line(self, record: Mapping[str, Any]) -> None:
        waited = self._metrics.waiting
        try:
            self._metrics.write(json.dumps(record))
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


def _warn_of_metrics(report: BoundaryReport) -> None:
    """Warn of metrics that are not finite; `train.on_non_finite` is for the loss."""
    for name, value in report.metrics.items():
        if not math.isfinite(value):
            warn(
                f"metric '{name}' is {value} in update {report.update}: a sum in Loss.metrics was "
                "not finite, on some rank in some micro-step",
                kind=f"metric {name}",
            )
