"""The training loop for jobs, the same for every framework: windows in, records out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from orchestrator.client.loop import Cadence
from orchestrator.config.schema import TrainConfig
from orchestrator.engine.api import BoundaryReport, Engine, MicroBatch, Window
from orchestrator.lifecycle.stopping.stop_signals import StopFlag

KEPT = 1000
"""Updates that each rank knows the figures of; a disk may be full for so many."""


class Windows(Protocol):
    """Where the loop gets its work from: one rank's window of each update, and epochs."""

    def window(self, update: int) -> Window: ...
    def epoch_of(self, update: int) -> int: ...


class Recorder(Protocol):
    """Where the loop's results go. Only rank 0's recorder writes; the others' do nothing."""

    def micro_step(self, update: int, done: int, steps: int) -> None: ...
    def boundary(
        self, window: Window, report: BoundaryReport, *, epoch: int, update_s: float
    ) -> None: ...
    def evaluation(self, update: int, epoch: int, figures: dict[str, float]) -> None: ...
    def checkpoint(self, updates: int, samples: int) -> None: ...


class Attended(Recorder, Protocol):
    """What the loop tells of itself, on every rank."""

    def together(self, engine: Engine, *, last: bool) -> None:
        """All ranks have met between two windows, after which `last`: none follows. Collective."""
        ...


@dataclass(frozen=True, slots=True)
class Done:
    """An update that was applied: its window, what all ranks know of it, this rank's seconds."""

    window: Window
    report: BoundaryReport
    seconds: float


@dataclass(slots=True)
class Outcome:
    """How the loop ended. `updates` and `samples` count from the run's beginning.

    Attributes:
        done: the last update of this attempt.
        kept: it and those before it, for a rank that comes to write where the one that wrote is
            gone with lines that there was no room for.
        newcomers: the loop was left after it for others to be let in; nothing but its record has
            followed it yet.
        returned: this attempt went back to a checkpoint, whose last update was done before.
        recorded, evaluated: how many updates this rank has recorded, and when it evaluated last.
    """

    state: str = "finished"
    updates: int = 0
    samples: int = 0
    loss: float = float("nan")
    evaluation: dict[str, float] = field(default_factory=dict[str, float])
    collectives: int = 0
    bytes_on_wire: int = 0
    done: Done | None = None
    returned: bool = False
    recorded: int = 0
    evaluated: int = 0
    newcomers: bool = False
    kept: deque[Done] = field(default_factory=lambda: deque(maxlen=KEPT))

    def take(self, done: Done) -> None:
        """One more update was applied."""
        self.done = done
        self.kept.append(replace(done, window=replace(done.window, micro_batches=())))
        self.updates, self.loss = done.window.update + 1, done.report.loss
        self.samples += done.window.samples

    def over(self, updates: int) -> bool:
        """Whether no window follows: all `updates` are done, or all ranks agreed to stop."""
        stops = self.done is not None and self.done.report.stop_requested
        return self.updates >= updates or stops

    def go_back(self) -> None:
        """To `updates` and `samples`, which are a checkpoint's now."""
        self.done, self.returned = None, True
        self.recorded = min(self.recorded, self.updates)
        self.evaluated = min(self.evaluated, self.updates)
        while self.kept and self.kept[-1].window.update >= self.updates:
            self.kept.pop()


def _work(windows: Windows, first: int, last: int) -> Iterator[MicroBatch]:
    for update in range(first, last):
        yield from windows.window(update).micro_batches


def train(
    *,
    engine: Engine,
    windows: Windows,
    recorder: Attended,
    settings: TrainConfig,
    updates: int,
    stop: StopFlag,
    rank: int,
    outcome: Outcome,
) -> Outcome:
    """Train from the `updates` of `outcome` up to `updates`, or until all ranks agree to stop, or
    to let newcomers in.

    Args:
        outcome: where the run stands; it is filled on and given back. Survivors that train on in
            another group come with the one that they had.
    """
    follow_up = _FollowUp(engine, windows, recorder, settings, updates, rank, outcome)
    batches = engine.batches(_work(windows, outcome.updates, updates))
    for done in outcome.kept:
        follow_up.record(done)
    if outcome.done is not None:  # a rank that is gone may have been about to
        follow_up.of(outcome.done, again=True)
    while outcome.updates < updates and outcome.state != "stopped" and not outcome.newcomers:
        update, began = outcome.updates, time.perf_counter()
        window = windows.window(update)
        engine.begin_window(window)
        for done, micro_batch in enumerate(window.micro_batches):
            recorder.micro_step(update, done, window.steps)
            engine.micro_step(next(batches), micro_batch)
        recorder.micro_step(update, window.steps, window.steps)
        report = engine.boundary(stop=stop.requested)
        applied = Done(window, report, time.perf_counter() - began)
        outcome.take(applied)
        more = outcome.updates < updates and not report.stop_requested
        outcome.newcomers = report.newcomers and more
        if outcome.newcomers:
            follow_up.record(applied)
        else:
            follow_up.of(applied)
    return outcome


@dataclass(frozen=True, slots=True)
class _FollowUp:
    """What follows an update: its record, an evaluation, a checkpoint. See `train`."""

    engine: Engine
    windows: Windows
    recorder: Attended
    settings: TrainConfig
    updates: int
    rank: int
    outcome: Outcome

    def of(self, done: Done, *, again: bool = False) -> None:
        """Collective. `again`: some ranks have done some of it; what is there is left as it is."""
        outcome, update = self.outcome, done.window.update
        epoch = self.windows.epoch_of(update)
        self.record(done)
        last = outcome.updates == self.updates
        leaving = done.report.stop_requested and not last
        ends = last or self.windows.epoch_of(update + 1) != epoch
        saving = last or leaving or self._due(self.settings.checkpoint_every, epoch_ends=ends)
        if saving:  # nothing is kept of which ranks do not agree what it is
            self.engine.check_replicas()
            if not again:
                self.recorder.together(self.engine, last=last or leaving)
        evaluating = last or self._due(self.settings.evaluate_every, epoch_ends=ends)
        if self.rank == 0 and not leaving and evaluating and outcome.evaluated <= update:
            outcome.evaluation = self.engine.evaluate()
            self.recorder.evaluation(update, epoch, outcome.evaluation)
            outcome.evaluated = update + 1
        if saving:
            self.engine.gather_state()
            self.recorder.checkpoint(outcome.updates, outcome.samples)
        if leaving:
            outcome.state = "stopped"

    def record(self, done: Done) -> None:
        """Its line, once. Not collective."""
        update = done.window.update
        if self.outcome.recorded <= update:
            epoch = self.windows.epoch_of(update)
            self.recorder.boundary(done.window, done.report, epoch=epoch, update_s=done.seconds)
            self.outcome.recorded = update + 1

    def _due(self, every: int | None, *, epoch_ends: bool) -> bool:
        return Cadence(every=every).due(self.outcome.updates, epoch_ends=epoch_ends)
