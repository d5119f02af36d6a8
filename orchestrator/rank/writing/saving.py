"""Checkpoints written while training goes on, one at a time, or on the spot."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from orchestrator.engine.api import Engine
from orchestrator.errors import ConfigError
from orchestrator.rundir.checkpoints import Saves


class Kept(Saves, Protocol):
    """A state that training goes on without; see `Engine.snapshot`."""

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
        except Exception as error:  # noqa: BLE001  # raised, or told, by the main thread
            failed = error
        self._written = Written(updates=updates, seconds=time.monotonic() - began, error=failed)

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def ended(self, *, wait: bool) -> Written | None:
        """What came of the checkpoint that was begun last, once; None while it is being written,
        and where there is none.

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
