"""The training loop, the same for every framework: windows in, one boundary each, records out.

Read `train` from top to bottom: it is the whole of what a rank does between rendezvous and the end.
All ranks take every decision in it (stop, evaluate, save, end) from values that they share.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from orchestrator.config.schema import TrainConfig
from orchestrator.engine.api import BoundaryReport, Engine, MicroBatch, Window
from orchestrator.lifecycle.stopping.stop_signals import StopFlag


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


@dataclass(slots=True)
class Outcome:
    """How the loop ended. `updates` and `samples` count from the run's beginning."""

    state: str = "finished"
    updates: int = 0
    samples: int = 0
    loss: float = float("nan")
    evaluation: dict[str, float] = field(default_factory=dict[str, float])
    collectives: int = 0
    bytes_on_wire: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cadence:
    """When to evaluate and to save: every n updates, at the ends of epochs (None), or never (0)."""

    every: int | None

    def due(self, done: int, *, epoch_ends: bool) -> bool:
        return epoch_ends if self.every is None else bool(self.every) and done % self.every == 0


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
    """Train from the `updates` of `outcome` up to `updates`, or until all ranks agree to stop.

    Args:
        outcome: where the run stands; it is filled on and given back.
    """
    evaluate = Cadence(every=settings.evaluate_every)
    save = Cadence(every=settings.checkpoint_every)
    batches = engine.batches(_work(windows, outcome.updates, updates))
    for update in range(outcome.updates, updates):
        began = time.perf_counter()
        window = windows.window(update)
        engine.begin_window(window)
        for done, micro_batch in enumerate(window.micro_batches):
            recorder.micro_step(update, done, window.steps)
            engine.micro_step(next(batches), micro_batch)
        recorder.micro_step(update, window.steps, window.steps)
        report = engine.boundary(stop=stop.requested)

        outcome.updates, outcome.loss = update + 1, report.loss
        outcome.samples += window.samples
        epoch = windows.epoch_of(update)
        recorder.boundary(window, report, epoch=epoch, update_s=time.perf_counter() - began)

        last = outcome.updates == updates
        leaving = report.stop_requested and not last
        epoch_ends = last or windows.epoch_of(update + 1) != epoch
        saving = last or leaving or save.due(update + 1, epoch_ends=epoch_ends)
        if saving:  # nothing is kept of which ranks do not agree what it is
            engine.check_replicas()
            recorder.together(engine, last=last or leaving)
        if rank == 0 and not leaving and (last or evaluate.due(update + 1, epoch_ends=epoch_ends)):
            outcome.evaluation = engine.evaluate()
            recorder.evaluation(update, epoch, outcome.evaluation)
        if saving:
            engine.gather_state()
            recorder.checkpoint(outcome.updates, outcome.samples)
        if leaving:
            outcome.state = "stopped"
            break
    return outcome
