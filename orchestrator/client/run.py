"""`from orchestrator import current_run`: the run as a program's own loop, or a job class, sees it.

Under plain Python or torchrun the same lines do nothing: nothing is recorded, nothing stops.

A job class reads from it what would otherwise be counted on `self`, and lost at a restart: the
update, the epoch, the rank, the folder.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from orchestrator.client.arguments import figures, whole_number
from orchestrator.client.stop import Stop
from orchestrator.errors import JobError
from orchestrator.rundir.files import LineFile
from orchestrator.rundir.program_link import ATTEMPT, DECLARED, RANK, RUN, SIGNAL, WORLD

METRICS = "metrics.jsonl"


class CurrentRun:
    """The run that this process is a rank of; false outside any run.

    Attributes:
        folder: of the run; the working folder without one.
        checkpoint_dir: folder for checkpoints; `checkpoints` in the working folder without a run.
        attempt: number of earlier starts of the run.
        rank: of this process; 0 without a run.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._is = RUN in env
        self.folder = Path(env.get(RUN) or Path.cwd())
        self.checkpoint_dir = self.folder / "checkpoints"
        self.attempt = int(env.get(ATTEMPT) or env.get("TORCHELASTIC_RESTART_COUNT") or 0)
        self.rank, self._size = int(env.get(RANK, "0")), int(env.get(WORLD, "1"))
        self._update: int | None = None
        self._epoch: int | None = None
        self._job = ""
        folder = self.folder / "attempts" / f"{self.attempt:03d}"
        signals = {signal.SIGTERM, signal.Signals[f"SIG{env.get(SIGNAL, 'TERM')}"]}
        self._stop = Stop(folder, self.rank, self._size, tuple(signals))
        self._lines: LineFile | None = None
        self._lock = threading.Lock()  # of the file, as any thread may report
        self._latest, self._pid = time.perf_counter(), 0
        self._windows: Any = None
        self._stopping = False
        if self._is and signal.getsignal(signal.SIGQUIT) == signal.SIG_DFL:
            faulthandler.register(signal.SIGQUIT, file=2)  # requests the stack of a rank that hangs

    def __bool__(self) -> bool:
        return self._is or bool(self._job)

    @property
    def update(self) -> int:
        """Return the number of the update under way, from 0: in `loss` and `after_update` of a job,
        and in a window of `run.windows`. In `evaluate` it is that of the latest update.

        Raises:
            JobError: no update is known here: before the training, or in a loader's worker, which
                reads ahead.
        """
        return self._known("update", self._update)

    @property
    def epoch(self) -> int:
        """Return the number of that update's epoch, from 0. Raises as `update`."""
        return self._known("epoch", self._epoch)

    def _known(self, name: str, value: int | None) -> int:
        if value is None:
            raise JobError(
                f"current_run.{name} is not known here: it is in loss(), after_update() and "
                "evaluate() of a job and in the loop over run.windows(), but not before the "
                "training, nor in loader workers, which read ahead"
            )
        return value

    def enter_job(self, job: str, folder: Path, attempt: int, rank: int, ranks: int) -> None:
        """Make this the run of a job class, whose trainer reports, saves and stops by itself.

        Args:
            job: the name of its class.
        """
        self._job, self.folder, self.attempt = job, folder, attempt
        self.checkpoint_dir = folder / "checkpoints"
        self.set_ranks(rank, ranks)

    def set_ranks(self, rank: int, ranks: int) -> None:
        """Set this process's rank among those that train now."""
        self.rank, self._size = rank, ranks

    def set_update(self, update: int, epoch: int) -> None:
        """Set the update that is under way."""
        self._update, self._epoch = update, epoch

    def report(
        self, update: int, *, loss: float, samples: int | None = None, **metrics: float
    ) -> None:
        """Record a completed update (from 0). Only rank 0 records.

        Args:
            loss: a number, or a tensor that holds one, for which the call waits as `.item()` does.
            samples: of this update, over all ranks.
            metrics: further figures by name.
        """
        if not self._begin("report()"):
            return
        number = whole_number("report", "update", update)
        record: dict[str, Any] = {"update": number, **figures({"loss": loss})}
        if samples is not None:
            record["samples"] = whole_number("report", "samples", samples)
        record["metrics"] = figures(metrics)
        now = time.perf_counter()
        spent, self._latest = now - self._latest, now
        self.record({**record, "time": time.time(), "update_s": spent})

    def should_stop(self, update: int) -> bool:
        """Return whether to save and leave now, after `update`. Every rank must call this after
        every update, and gets the same answer; no collective is called.
        """
        if not self._begin("should_stop()"):
            return False
        self._stopping = self._stop.due(whole_number("should_stop", "update", update))
        return self._stopping

    def save_done(self, update: int) -> None:
        """Record that a checkpoint after `update` is complete. Only rank 0 records."""
        if self._begin("save_done()"):
            number = whole_number("save_done", "update", update)
            self.record({"saved": number, "update": number, "time": time.time()})

    def windows(self, samples: int, accumulator: Any = None, **options: Any) -> Any:
        """Return the windows of a training, as in `run.windows(len(data), global_batch=256)`.

        Needs torch and an `Accumulator`. Collective; see `client/options.py`, which has the
        options, and docs/how-to/library.md.

        Args:
            samples: of the data set, the same number on all ranks.
            accumulator: or a list of those that share the windows; by default the only one.

        Raises:
            ConfigError, JobError: what was asked for cannot be, or is not the same on all ranks.
        """
        if self._job:
            self._begin("windows()")  # refuses it
        # By name: this module runs where there is no torch, and windows.py imports it.
        windows: Any = importlib.import_module("orchestrator.client.windows")
        if self._windows is not None and (self._is or self._windows.running):
            raise JobError(
                "run.windows() was called before: one call is the whole training, all its epochs "
                "(epochs=3, say); it goes on where it stopped"
            )
        self._windows = windows.windows_of(self, samples, accumulator, options)
        return self._windows

    @property
    def stopping(self) -> bool:
        """Return whether all ranks agreed to stop and continue later."""
        return self._stopping or (self._windows is not None and self._windows.stopping)

    @property
    def ranks(self) -> int | None:
        """Return the number of ranks of the run; None outside any run."""
        return self._size if self else None

    def take_sigterm(self) -> None:
        """In a run, replace a framework's handler of SIGTERM by a request to stop."""
        if self._is:
            self._stop.replace_handlers()

    def is_stop_requested(self) -> bool:
        """Return whether a stop reached this rank. For `windows`, whose boundaries agree on it."""
        return self._stop.requested(run=self._is)

    def release_signals(self) -> None:
        """Outside a run, end the handling of stop signals that `is_stop_requested` began."""
        if not self._is:
            self._stop.release_handlers()

    def agreed_to_stop(self, update: int) -> None:
        """Record that all ranks stop after `update`, as a boundary agreed."""
        if self._is:
            self._stop.agreed(update)

    def declare(self, activity: str) -> None:
        """Write down for this rank's agent what takes it long; "" when that is over."""
        path = self.folder / "attempts" / f"{self.attempt:03d}" / DECLARED.format(self.rank)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        try:
            with os.fdopen(os.open(path, flags, 0o600), "w") as file:
                file.write(activity)
        except OSError as error:
            self._warn(
                f"its agent cannot learn that this rank saves: {path.name}: {error.strerror}",
                about="rank",
            )

    def record(self, record: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl, on rank 0 of a run."""
        if not self._is or self.rank:
            return
        line = json.dumps({**record, "attempt": self.attempt})
        with self._lock:
            try:
                self._lines = self._lines or LineFile(self.folder / METRICS)
                self._lines.write(line)
            except OSError as error:
                self._warn(
                    f"metrics.jsonl could not be written: {error.strerror}; its lines are kept, "
                    "and follow as soon as there is room"
                )

    def _warn(self, sentence: str, about: Literal["rank", "run"] = "run") -> None:
        """Warn, as the ranks of a job do: on the console and in the run folder."""
        from orchestrator.rundir.warnings import warn  # most programs never need it

        warn(sentence, about=about)

    def _begin(self, call: str) -> bool:
        """Return whether there is a run. Raises `JobError` where the call is not allowed."""
        if self._job:
            raise JobError(
                f"current_run.{call} is for loops of one's own; the trainer of a job class "
                f"({self._job}) reports, saves and stops by itself, and figures belong in "
                "Loss(..., metrics=...)"
            )
        own = call == "save_done()" and self._windows is not None and not self._windows.saves
        if self._windows is not None and self._windows.running and not own:
            raise JobError(
                f"run.{call} was called within the loop over run.windows(), which reports, saves "
                "and stops by itself; figures of yours belong in Loss(..., metrics=...)"
            )
        if not self._is:
            return False
        self._pid = self._pid or os.getpid()
        if self._pid != os.getpid():
            raise JobError(
                f"run.{call} was called in a fork of the process that called it first (a loader's "
                "worker?); the training's own process has to"
            )
        return True


current_run = CurrentRun(os.environ)
