"""What rank 0 writes down: metrics.jsonl, scalars, checkpoints, where it stands."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from orchestrator.config.schema import Config
from orchestrator.engine.api import BoundaryReport, Engine, Window
from orchestrator.errors import RunFolderError
from orchestrator.rank.agreed.stated_facts import UpdateTime
from orchestrator.rank.writing.line_file import LineFile
from orchestrator.rank.writing.log_lines import UpdateLines
from orchestrator.rank.writing.saving import Saving
from orchestrator.rank.writing.tracker import Scalars
from orchestrator.rundir import checkpoints as checkpoint
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import ProgressWriter
from orchestrator.rundir.warnings import NewWarnings, warn


class Silent:
    """The recorder of every rank but 0."""

    def micro_step(self, update: int, done: int, steps: int) -> None: ...
    def boundary(
        self, window: Window, report: BoundaryReport, *, epoch: int, update_s: float
    ) -> None: ...
    def evaluation(self, update: int, epoch: int, figures: dict[str, float]) -> None: ...
    def checkpoint(self, updates: int, samples: int) -> None: ...
    def settle(self) -> None: ...


class Recorder:
    """Rank 0's. A line of metrics.jsonl is one `write`, so a reader sees whole lines but the last.

    Some of it stands in the rank's log as well. A full disk never ends a training: lines wait for
    room, a checkpoint that cannot be written is said, the last good one kept, and the next one
    tried when it is due. Only at the end (`close`) does it matter.
    """

    def __init__(
        self, run: RunDir, attempt: int, config: Config, engine: Engine, updates: int
    ) -> None:
        self._run, self._attempt, self._engine = run, attempt, engine
        self._keep = config.train.keep_checkpoints
        self._saving = Saving(engine, background=config.train.checkpoint_in_background)
        self._save_s = 0.0
        self._identity = run.identity
        self._metrics = LineFile(run.metrics)
        self._unsaved: str | None = None  # why the latest checkpoint could not be written
        self._place = ProgressWriter(run.progress(attempt))
        self._scalars = Scalars(run, config)
        self.note: dict[str, Any] = {}  # goes with the next update's line, once
        self._warnings = NewWarnings(run.attempt(attempt))  # of all ranks
        self._update = -1
        self._pace = UpdateTime(config.facts.update_s)
        self._told = UpdateLines(updates)

    def micro_step(self, update: int, done: int, steps: int) -> None:
        self._place.write(update, done, steps)

    def boundary(
        self, window: Window, report: BoundaryReport, *, epoch: int, update_s: float
    ) -> None:
        self._update = window.update
        self._take_written(wait=False)
        _warn_of_metrics(report)
        self._pace.see(update_s)
        line = {
            "epoch": epoch,
            "attempt": self._attempt,
            "learning_rate": window.learning_rate,
            "samples": window.samples,
            "micro_steps": window.steps,
            "peak_memory_bytes": self._engine.peak_memory_bytes(),
        }
        self._line(update_line(report, update_s) | line | self.note | self._warned())
        self.note = {}
        self._told.update(
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

    def evaluation(self, update: int, epoch: int, figures: dict[str, float]) -> None:
        self._line(
            {"evaluation": figures, "update": update, "epoch": epoch, "time": time.time(),
             "attempt": self._attempt}
        )  # fmt: skip
        self._told.evaluation(update, figures)
        self._scalars.write(
            update, {f"evaluation/{name}": value for name, value in figures.items()}
        )

    def can_save(self) -> bool:
        """Whether a checkpoint can be written in mid-window: rank 0 holds all of the state."""
        return self._engine.holds_state()

    def checkpoint(self, updates: int, samples: int) -> None:
        self._take_written(wait=True)
        write = partial(
            checkpoint.save, self._run.checkpoints, updates=updates, samples=samples,
            keep=self._keep, run=self._identity,
        )  # fmt: skip
        self._saving.begin(updates, write)
        self._take_written(wait=False)

    def settle(self) -> None:
        """Return once no checkpoint is being written any more."""
        self._take_written(wait=True)

    @property
    def save_s(self) -> float:
        """How long a checkpoint that is due now takes until it is written, by the last one."""
        return self._save_s * (1 + self._saving.running)

    def _take_written(self, *, wait: bool) -> None:
        written = self._saving.ended(wait=wait)
        if written is None:
            return
        self._save_s, error = written.seconds, written.error
        told = f"the checkpoint after update {written.updates}"
        if error is None:
            if self._unsaved is not None:
                warn(f"there is room again: {told} was written")
            self._unsaved = None
            return
        if not isinstance(error, OSError):
            raise error
        self._unsaved = f"{told} could not be written: {error.strerror or error}"
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


def update_line(report: BoundaryReport, update_s: float) -> dict[str, Any]:
    """What a line of metrics.jsonl says of an update by its boundary's report."""
    seconds = ("compute_s", "wait_s", "optimizer_s", "compile_s", "plain_step_s")
    always = seconds[:3]
    return {
        "update": report.update,
        "time": time.time(),
        "loss": report.loss,
        "weight": report.weight,
        "collectives": report.collectives,
        **({"exchanges": report.exchanges} if report.exchanges else {}),
        "bytes_on_wire": report.bytes_on_wire,
        **{
            name: round(spent, 6)
            for name in seconds
            if (spent := getattr(report, name)) or name in always
        },
        "update_s": round(update_s, 6),
        "gradient_norm": report.gradient_norm,
        "applied": report.applied,
        "loss_scale": report.loss_scale,
        "metrics": dict(report.metrics),
    }


def _warn_of_metrics(report: BoundaryReport) -> None:
    """What `Loss.metrics` came to; a loss that is not finite is `train.on_non_finite`'s."""
    for name, value in report.metrics.items():
        if not math.isfinite(value):
            warn(
                f"metric '{name}' is {value} in update {report.update}: a sum in Loss.metrics was "
                "not finite, on some rank in some micro-step",
                kind=f"metric {name}",
            )
