"""Checkpoints of a training loop: restored on all ranks, written by rank 0, perhaps by a thread.

Files, digests and names are those of `rundir/checkpoints.py`; torn or damaged ones are passed over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from orchestrator.client.loop import Callback, Done, Replicas, TrainingProgress
from orchestrator.errors import ConfigError
from orchestrator.rundir import checkpoints as checkpoint
from orchestrator.rundir.checkpoints import Saves
from orchestrator.rundir.warnings import warn


class TrainingState(Replicas, Saves, Protocol):
    """The state of a training; see `Engine`, which is one."""

    def gather(self, numbers: Sequence[float]) -> list[list[float]]: ...
    def holds_state(self) -> bool: ...
    def load_state(self, folder: Path, extra: Mapping[str, Any]) -> None: ...


class Checkpoints(Callback):
    """Checkpoints of one training, whose callback rank 0 alone has.

    A checkpoint that cannot be written (a full disk) causes a warning: the last good one stays, and
    the next is tried when it is due.

    Args:
        run: the run's identity; None outside any run.
        keep: number of checkpoints to keep.
        background: write in a thread, from a copy. A checkpoint that is due waits for the one
            before it: where a disk is slower than the training, the training has the disk's pace,
            as it has without a thread, and no checkpoint is left out.
        on_written: called with the number of updates.

    Attributes:
        unsaved: why the latest checkpoint could not be written.

    Raises:
        ConfigError: the state gives no copies of itself.
    """

    def __init__(
        self,
        folder: Path,
        state: TrainingState,
        *,
        run: str | None,
        keep: int,
        background: bool = False,
        on_written: Callable[[int], None] | None = None,
    ) -> None:
        if background and not hasattr(state, "snapshot"):
            raise ConfigError(
                "train.checkpoint_in_background=true is not available with this engine, which "
                f"gives no copy of its state ({type(state).__name__}); leave it out"
            )
        self._folder, self._state, self._run, self._keep = folder, state, run, keep
        self._background, self._on_written = background, on_written
        self._thread: threading.Thread | None = None
        self._written: tuple[int, float, Exception | None] | None = None  # updates, seconds
        self._save_s = self._waited_s = 0.0
        self.unsaved: str | None = None

    def restore(self, rank: int) -> tuple[int, int] | None:
        """Load the newest sound checkpoint, the same on every rank. Collective.

        Returns:
            Its updates and samples; None without one.

        Raises:
            RunFolderError: there are checkpoints, but none can be used.
        """
        found, passed_over = None, list[str]()
        if rank == 0:
            checkpoint.make_again(self._folder)
            checkpoint.remove_partial(self._folder)
            found, passed_over = checkpoint.newest(self._folder, self._run)
        for sentence in passed_over:
            warn(sentence)
        updates = int(self._state.gather([found.updates if found else -1])[0][0])
        if updates < 0:
            return None
        folder = checkpoint.folder_of(self._folder, updates)
        chosen = found or checkpoint.load(folder, self._run)
        self._state.load_state(chosen.folder, chosen.extra)
        return chosen.updates, chosen.samples

    def can_save(self) -> bool:
        """Return whether rank 0 holds all of the state, so that it can save inside a window."""
        return self._state.holds_state()

    def has(self, updates: int) -> bool:
        """Return whether there is a checkpoint after so many updates."""
        return checkpoint.folder_of(self._folder, updates).exists()

    @property
    def save_s(self) -> float:
        """Seconds until a checkpoint that is due now is written, estimated from the last one."""
        running = self._thread is not None and self._thread.is_alive()
        return max(self._waited_s, self._save_s * (1 + running))

    def on_boundary(self, done: Done) -> None:
        del done
        self._report_written()

    def on_checkpoint(self, updates: int, samples: int) -> None:
        began = time.monotonic()
        self.settle()
        if self._background:
            copy = cast("Any", self._state).snapshot()
            self._thread = threading.Thread(
                target=self._write, args=(copy, updates, samples), name="checkpoint", daemon=True
            )
            self._thread.start()
        else:
            self._write(self._state, updates, samples)
            self._report_written()
        self._waited_s = time.monotonic() - began

    def save_now(self, progress: TrainingProgress) -> None:
        """Save after the last update, and wait until that is written. For rank 0."""
        self.on_checkpoint(progress.updates, progress.samples)
        self.settle()

    def _write(self, state: Any, updates: int, samples: int) -> None:
        began, failed = time.monotonic(), None
        try:
            if self._background:
                state.take()
            checkpoint.save(
                self._folder, state, updates=updates, samples=samples, keep=self._keep,
                run=self._run,
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001  # raised, or warned of, by the main thread
            failed = error
        self._written = updates, time.monotonic() - began, failed

    def settle(self) -> None:
        """Return once no checkpoint is being written any more."""
        if self._thread is not None:
            self._thread.join()
        self._report_written()

    def _report_written(self) -> None:
        """Report how the latest checkpoint ended, once, unless it is still being written."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = None
        written, self._written = self._written, None
        if written is None:
            return
        updates, self._save_s, error = written
        name = f"the checkpoint after update {updates}"
        if error is None:
            if self.unsaved is not None:
                warn(f"there is room again: {name} was written")
            self.unsaved = None
            if self._on_written is not None:
                self._on_written(updates)
            return
        if not isinstance(error, OSError):
            raise error
        self.unsaved = f"{name} could not be written: {error.strerror or error}"
        kept = ", the last good checkpoint is kept" * any(self._folder.glob("update-*"))
        warn(f"{self.unsaved}; the run goes on{kept}", kind="checkpoint not written")
