"""Where scalars go beside metrics.jsonl: `Tracker`, and what keeps one from ending a training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

from orchestrator.config.reading import NoOptions, options_of
from orchestrator.config.schema import Config
from orchestrator.plugins import TRACKERS
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.warnings import warn


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
        """Raises `ConfigError` for options that cannot be; the run then does not begin."""
        self.run, self.config = run, config
        self.options = options_of(self.Options, config.tracker.options, "tracker.options")

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars of update `step`, from 0. After a resume a step may come twice."""

    def close(self) -> None:  # most have nothing to end
        """Nothing follows."""


class Scalars:
    """What rank 0 hands its scalars to, whatever becomes of the tracker. Raises `ConfigError`."""

    def __init__(self, run: RunDir, config: Config) -> None:
        kind = config.tracker.kind
        self._tracker = None if kind == "none" else TRACKERS.make(kind, Tracker, run, config)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._try(lambda tracker: tracker.write(step, values))

    def close(self) -> None:
        self._try(lambda tracker: tracker.close())

    def _try(self, write: Callable[[Tracker], None]) -> None:
        """A writer need not be able to go on after an error, so scalars end with the first."""
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
