"""`from orchestrator import current_run`: what a program's own loop may know of its run, and say.

Under plain Python or torchrun the same lines do nothing: nothing is recorded, nothing ever stops.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.errors import JobError
from orchestrator.inside.stop import Stop
from orchestrator.inside.variables import ATTEMPT, RANK, RUN, WORLD

FLUSH_S = 5.0
Line = dict[str, Any]


class Run:
    """The run that this process is a rank of; false where it is none.

    Attributes:
        folder: of the run; the working folder without one.
        checkpoint_dir: where checkpoints belong; `checkpoints` in the working folder without a run.
        attempt: how often the run was started before.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._is = RUN in env
        self.folder = Path(env.get(RUN) or Path.cwd())
        self.checkpoint_dir = self.folder / "checkpoints"
        self.attempt = int(env.get(ATTEMPT) or env.get("TORCHELASTIC_RESTART_COUNT") or 0)
        self._rank, self._size = int(env.get(RANK, "0")), int(env.get(WORLD, "1"))
        folder = self.folder / "attempts" / f"{self.attempt:03d}"
        self._stop = Stop(folder, self._rank, self._size)
        self._lines: queue.SimpleQueue[Line | threading.Event | None] | None = None
        self._writer: threading.Thread | None = None
        self._latest = time.perf_counter()
        self._windows: Any = None
        self._stopping = False
        if self._is and signal.getsignal(signal.SIGQUIT) == signal.SIG_DFL:
            faulthandler.register(signal.SIGQUIT, file=2)  # where a rank that hangs is asked: where

    def __bool__(self) -> bool:
        return self._is

    def report(
        self, update: int, *, loss: float, samples: int | None = None, **metrics: float
    ) -> None:
        """Record an update (from 0) that is done. Rank 0's words count; it never waits for a disk.

        Args:
            samples: of this update, over all ranks.
            metrics: further figures by name.
        """
        self._refuse_beside_windows("report()")
        if not self._is or self._rank:
            return
        now = time.perf_counter()
        record: dict[str, Any] = {
            "update": int(update), "time": time.time(),
            "loss": loss, "update_s": now - self._latest, "metrics": metrics,
        }  # fmt: skip
        if samples is not None:
            record["samples"] = samples
        self._latest = now
        self.record(record)

    def should_stop(self, update: int) -> bool:
        """Whether to save and leave now, after `update`. Every rank has to ask after every update,
        and gets the same answer; no collective is called.
        """
        self._refuse_beside_windows("should_stop()")
        self._stopping = self._is and self._stop.due(update)
        return self._stopping

    def save_done(self, update: int) -> None:
        """Note that what comes after `update` can go on from a checkpoint. Rank 0's words count."""
        self._refuse_beside_windows("save_done()")
        if self._is and not self._rank:
            self.record({"saved": int(update), "update": int(update), "time": time.time()})

    def windows(self, samples: int, accumulator: Any = None, **options: Any) -> Any:
        """The windows of a training: `for window in run.windows(len(data), global_batch=256)`.

        Needs torch and an `Accumulator`. Collective; see `orchestrator.own_loop`, which has the
        options, and docs/library.md.

        Args:
            samples: of the data set, the same number on all ranks.
            accumulator: or a list of those that share the windows; by default the only one.

        Raises:
            ConfigError, JobError: what was asked for cannot be, or is not the same on all ranks.
        """
        # By name: this room is beneath all others, and runs where there is no framework.
        library: Any = importlib.import_module("orchestrator.own_loop")
        if self._windows is not None and (self._is or self._windows.going_on):
            raise JobError(
                "run.windows() was called before: one call is the whole training, all its epochs "
                "(epochs=3, say); it goes on where it stopped"
            )
        self._windows = library.windows_of(self, samples, accumulator, options)
        return self._windows

    @property
    def stopping(self) -> bool:
        """Whether all ranks agreed to stop, to go on later: for what follows a whole training."""
        return self._stopping or (self._windows is not None and self._windows.stopping)

    @property
    def ranks(self) -> int | None:
        """How many the run has; None where there is none."""
        return self._size if self._is else None

    def take_sigterm(self) -> None:
        """In a run: SIGTERM asks for a stop from now on, in the place of a framework's handler."""
        if self._is:
            self._stop.take()

    def asked_to_stop(self) -> bool:
        """Whether this rank heard of a stop. For `windows`, whose boundaries agree on it."""
        return self._stop.asked(run=self._is)

    def agreed_to_stop(self, update: int) -> None:
        """All ranks stop after `update`, by a boundary's flag."""
        if self._is:
            self._stop.agreed(update)

    def _refuse_beside_windows(self, call: str) -> None:
        if self._windows is not None and self._windows.going_on:
            raise JobError(
                f"run.{call} was called within the loop over run.windows(), which reports, saves "
                "and stops by itself; figures of yours belong in Loss(..., metrics=...)"
            )

    def record(self, record: dict[str, Any]) -> None:
        """Have a line written to metrics.jsonl, by rank 0 of a run; nobody waits for it."""
        if not self._is or self._rank:
            return
        record["attempt"] = self.attempt
        if self._lines is None:
            self._lines = queue.SimpleQueue()
            self._writer = threading.Thread(
                target=self._write, args=(self._lines,), name="report", daemon=True
            )
            self._writer.start()
            atexit.register(self._close)
        self._lines.put(record)

    def flush(self) -> None:
        """Wait until what was recorded before is written: a checkpoint is not to be ahead of it."""
        if self._lines is not None:
            written = threading.Event()
            self._lines.put(written)
            written.wait(FLUSH_S)

    def _write(self, lines: queue.SimpleQueue[Line | threading.Event | None]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.folder / "metrics.jsonl", flags, 0o600)
        waiting, said = b"", False
        while (record := lines.get()) is not None:
            if isinstance(record, threading.Event):
                record.set()
                continue
            for name in ("loss", "metrics"):
                if name in record:
                    record[name] = _plain(record[name])
            waiting += json.dumps(record).encode() + b"\n"
            try:
                waiting = waiting[os.write(descriptor, waiting) :]
            except OSError as error:  # the lines are kept, and follow as soon as there is room
                if not said:
                    said = True
                    warning = f"warning: metrics.jsonl could not be written: {error.strerror}"
                    print(warning, file=sys.stderr, flush=True)
        os.close(descriptor)

    def _close(self) -> None:
        if self._lines is not None and self._writer is not None:
            self._lines.put(None)
            self._writer.join(FLUSH_S)


def _plain(value: Any) -> Any:
    """Tensors and arrays of one number as numbers; NaN and infinities stay what they are."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    return value if value is None else float(value)


current_run = Run(os.environ)
