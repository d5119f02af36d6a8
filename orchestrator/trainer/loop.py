"""The training loop of jobs, the same for every framework, and its callbacks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.client.loop import RankWindows, is_due
from orchestrator.config.schema import TrainConfig
from orchestrator.engine.api import BoundaryReport, Engine, MicroBatch, Window

KEPT = 1000
"""Updates whose lines a new rank 0 can write, if the disk was full when the last one was lost."""


@dataclass(frozen=True, slots=True)
class Done:
    """An applied update: its window, the boundary's report, and this rank's seconds."""

    window: Window
    report: BoundaryReport
    seconds: float
    epoch: int


class Callback:
    """Base of the callbacks of a rank's loop; a method that is not overridden does nothing.

    The loop calls its callbacks in the order of their list. An exception leaves the loop.
    """

    def on_micro_step(self, update: int, done: int, steps: int) -> None:
        """Handle the start of a micro-step, after `done` of `steps`; after all, of the boundary."""

    def on_meeting(self, engine: Engine, *, last: bool) -> None:
        """Exchange data between two windows, on all ranks. Collective.

        Args:
            last: no window follows.
        """

    def before_record(self) -> None:
        """Raise if this rank must not write any more; called before each of the methods below."""

    def on_boundary(self, done: Done) -> None:
        """Handle an applied update. Not collective."""

    def on_evaluation(self, done: Done, figures: dict[str, float]) -> None:
        """Handle the held-out figures after an update. Rank 0 only."""

    def on_checkpoint(self, updates: int, samples: int) -> None:
        """Handle a checkpoint that is due after so many updates."""


@dataclass(slots=True)
class Outcome:
    """Progress and end of the loop. `updates` and `samples` count from the run's beginning.

    Attributes:
        done: the last update of this attempt.
        kept: it and those before it.
        newcomers: the loop ended after it to let others in; only its record was written so far.
        returned: this attempt went back to a checkpoint.
        recorded, evaluated: updates that this rank has recorded, and after which it evaluated.
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

    def add(self, done: Done) -> None:
        """Add an applied update."""
        self.done = done
        self.kept.append(replace(done, window=replace(done.window, micro_batches=())))
        self.updates, self.loss = done.window.update + 1, done.report.loss
        self.samples += done.window.samples

    def over(self, updates: int) -> bool:
        """Return whether no window follows: all `updates` are done, or all ranks agreed to stop."""
        stops = self.done is not None and self.done.report.stop_requested
        return self.updates >= updates or stops

    def go_back(self) -> None:
        """Forget what came after the checkpoint that `updates` and `samples` are now of."""
        self.done, self.returned = None, True
        self.recorded = min(self.recorded, self.updates)
        self.evaluated = min(self.evaluated, self.updates)
        while self.kept and self.kept[-1].window.update >= self.updates:
            self.kept.pop()


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """The training loop of one rank in one group.

    Attributes:
        updates: of the whole run.
        outcome: progress, which the loop continues, in the next group after a loss too.
    """

    engine: Engine
    windows: RankWindows
    callbacks: Sequence[Callback]
    settings: TrainConfig
    updates: int
    stop_requested: Callable[[], bool]
    rank: int
    outcome: Outcome

    def run(self) -> None:
        """Train until all updates are done, or all ranks agree to stop, or to let newcomers in."""
        outcome, engine = self.outcome, self.engine
        batches = engine.batches(self._micro_batches())
        for done in outcome.kept:
            self._record(done)
        if outcome.done is not None:  # a rank that is lost may have had no time for all of this
            self._follow_up(outcome.done, again=True)
        while outcome.updates < self.updates and outcome.state != "stopped":
            update, began = outcome.updates, time.perf_counter()
            window = self.windows.window(update)
            engine.begin_window(window)
            for number, micro_batch in enumerate(window.micro_batches):
                self._micro_step(window, number)
                engine.micro_step(next(batches), micro_batch)
            self._micro_step(window, window.steps)
            report = engine.boundary(stop=self.stop_requested())
            seconds, epoch = time.perf_counter() - began, self.windows.epoch_of(update)
            done = Done(window, report, seconds, epoch)
            outcome.add(done)
            if report.newcomers and not outcome.over(self.updates):
                outcome.newcomers = True
                self._record(done)
                return
            self._follow_up(done)

    def _micro_batches(self) -> Iterator[MicroBatch]:
        for update in range(self.outcome.updates, self.updates):
            yield from self.windows.window(update).micro_batches

    def _micro_step(self, window: Window, done: int) -> None:
        for callback in self.callbacks:
            callback.on_micro_step(window.update, done, window.steps)

    def _before_record(self) -> None:
        for callback in self.callbacks:
            callback.before_record()

    def _record(self, done: Done) -> None:
        """Pass an update to the callbacks, once. Not collective."""
        if self.outcome.recorded <= done.window.update:
            self._before_record()
            for callback in self.callbacks:
                callback.on_boundary(done)
            self.outcome.recorded = done.window.update + 1

    def _follow_up(self, done: Done, *, again: bool = False) -> None:
        """Record an update; evaluate and save where that is due. Collective.

        Args:
            again: some ranks did a part of it before another was lost; that part stays as it is.
        """
        outcome, update = self.outcome, done.window.update
        self._record(done)
        last = outcome.updates == self.updates
        leaving = done.report.stop_requested and not last
        ends = last or self.windows.epoch_of(update + 1) != done.epoch
        every = self.settings.checkpoint_every
        saving = last or leaving or is_due(every, outcome.updates, epoch_ends=ends)
        if saving:
            self.engine.check_replicas()  # ranks that disagree about the state must not save it
            for callback in () if again else self.callbacks:
                callback.on_meeting(self.engine, last=last or leaving)
        evaluating = last or is_due(self.settings.evaluate_every, outcome.updates, epoch_ends=ends)
        if self.rank == 0 and not leaving and evaluating and outcome.evaluated <= update:
            outcome.evaluation = self.engine.evaluate()
            self._before_record()
            for callback in self.callbacks:
                callback.on_evaluation(done, outcome.evaluation)
            outcome.evaluated = update + 1
        if saving:
            self.engine.gather_state()
            self._before_record()
            for callback in self.callbacks:
                callback.on_checkpoint(outcome.updates, outcome.samples)
        if leaving:
            outcome.state = "stopped"
