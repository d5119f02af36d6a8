"""The training loop, the same for job classes and for `run.windows`, and its callbacks.

The life of an update on one rank:

1. The loop yields its window: the micro-batches that this rank computes.
2. The trainer (`trainer/main.py`, by an engine) or the user's own loop (`client/windows.py`, by
   accumulators) computes them, calls `begin_micro_step` before each and once after the last, and
   hands the boundary's report to `end_window`.
3. When the next window is asked for, the loop follows the update up: it is recorded; where it is
   due, all ranks compare their weights, all or rank 0 alone evaluate, and rank 0 saves. A stop that
   all ranks agreed on at the boundary saves as well, and ends the loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

from orchestrator.client.balance import Speeds
from orchestrator.engine.api import BoundaryReport, RecomputesLeaves
from orchestrator.engine.common.waiting import declared
from orchestrator.plan.plan import Plan
from orchestrator.plan.window import MicroBatch, Window, planner_of
from orchestrator.plugins import CALLBACKS

MOST_RECENT_UPDATES = 1000
"""Updates whose lines a new rank 0 can write, if the disk was full when the last one was lost."""


@dataclass(frozen=True, slots=True)
class CompletedUpdate:
    """A completed update: its window, the boundary's report, and this rank's seconds. The optimizer
    did not step if `report.applied` is False.
    """

    window: Window
    report: BoundaryReport
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a loop trains, for callbacks that look closer.

    Attributes:
        job: of a job class; None in a loop of the user's own.
        gradients: see `ShowsGradients`; no names where the engine shows none.
        engine: of a job class that computes leaves again; None elsewhere.
        windows: of this rank, in the present group.
    """

    job: Any = None
    gradients: Callable[[], Mapping[str, Any]] = dict[str, Any]
    engine: RecomputesLeaves | None = None
    windows: RankWindows | None = None


class Callback:
    """Base of the callbacks of a training loop; a method that is not overridden does nothing.

    The loop calls its callbacks in the order of their list, on every rank. An exception leaves the
    loop. Those of a user come after ours; they must neither change what the training computes with
    nor call collectives.
    """

    def on_start(self, trained: Trained) -> None:
        """Handle the start of the loop, once in each group of ranks."""

    def wants_stop(self, update: int) -> bool:
        """Return whether all ranks are to stop after this update, with a checkpoint. Called before
        its boundary; one rank's True is enough.
        """
        del update
        return False

    def on_micro_step(self, update: int, done: int, steps: int) -> None:
        """Handle the start of a micro-step, after `done` of `steps`; after all, of the boundary."""

    def on_held_out_piece(self, done: int) -> None:
        """Handle the start of a piece of held-out data, after `done` of this rank's, in an
        evaluation by all ranks. Not collective.
        """

    def before_record(self) -> None:
        """Raise if this rank must not write any more; called before each of the methods below."""

    def on_boundary(self, done: CompletedUpdate) -> None:
        """Handle a completed update. Not collective. A new rank 0 gets those again that the lost
        one has not recorded.
        """

    def on_evaluation(self, window: Window, figures: dict[str, float]) -> None:
        """Handle the held-out figures after the update of `window`, on ranks that computed them:
        rank 0 alone, or all where all evaluate. Those of `Job.evaluate` may be rank 0's alone.
        """

    def on_checkpoint(self, updates: int, samples: int) -> None:
        """Handle a checkpoint that is due after so many updates. Not collective."""


class CallbackNote(str):
    """The note on an exception that a callback has raised."""

    __slots__ = ()


def describe_misuse(callbacks: Any, source: str, example: str) -> str | None:
    """Return why a user's value is no list of callbacks; None if it is one.

    Args:
        source: what the value is, for the message.

    >>> describe_misuse([Callback], "callbacks", "callbacks=[losses]")
    'callbacks must be objects, as in callbacks=[losses], but one is the class Callback'
    """
    if not isinstance(callbacks, list | tuple):
        return f"{source} must be as in {example}, but is {callbacks!r:.60}"
    each: Sequence[Any] = callbacks
    for callback in each:
        if isinstance(callback, type) and issubclass(callback, Callback):
            name = callback.__name__
            return f"{source} must be objects, as in {example}, but one is the class {name}"
        if not isinstance(callback, Callback):
            return (
                f"{source} must derive from orchestrator.callbacks.Callback, but one is "
                f"{callback!r:.60}"
            )
    return None


def configured_callbacks(names: Sequence[str]) -> list[Callback]:
    """Return the callbacks that `run.callbacks` names. Raises `ConfigError`."""
    return [CALLBACKS.make(name, Callback) for name in names]


class RankWindows:
    """The windows of one rank, from the plan. Loop and loader ask for the same window at different
    times, so the latest few are cached.

    Args:
        rates: of the job, in the place of the plan's.
        ranks: their number, where it is not the plan's. No micro-batch becomes larger then, since
            it might not fit into memory.
        shard_ranks: the ranks that hold one copy of the model together with this one, if it is in
            shards. They get equally many micro-batches, since these are collective among them.
        speeds: of the ranks; None: equal.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        rates: Callable[[int], float] | None = None,
        *,
        ranks: int | None = None,
        shard_ranks: Sequence[int] = (),
        speeds: Speeds | None = None,
    ) -> None:
        self._planner, self.speeds = planner_of(plan), speeds
        # Another group has other shares: what fitted into memory stays the largest micro-batch.
        if ranks is not None and ranks != plan.ranks:
            largest = max(size for sizes in plan.split.micro_batches for size in sizes)
            cap = plan.batch.micro_batch_cap or largest
            batch = plan.batch if plan.work else replace(plan.batch, micro_batch_cap=cap)
            self._planner = replace(self._planner, ranks=ranks, batch=batch)
        self._rank, self._rates, self._shard_ranks = rank, rates, shard_ranks
        # In the instance: a cached method would keep each of these objects alive.
        self.window = lru_cache(maxsize=4)(self._window)

    def _window(self, update: int) -> Window:
        speeds = None if self.speeds is None else self.speeds.at(update)
        split = self._planner.assignment(update, speeds)
        window = self._planner.window(update, self._rank, split)
        of_ranks = split.micro_batches
        longest = max(self._shard_ranks, key=lambda rank: len(of_ranks[rank]), default=self._rank)
        if self.speeds is not None:
            window = replace(window, speeds=self.speeds.began_at(update))
        own = len(window.micro_batches)
        if padding := len(of_ranks[longest]) - own:
            # Those that the longest rank has more: their shapes occur anyway, their losses count 0.
            others = self._planner.window(update, longest, split).micro_batches[own:]
            micro_batches = (*window.micro_batches, *others)
            window = replace(window, micro_batches=micro_batches, padding=padding)
        return replace(window, learning_rate=self._rates(update)) if self._rates else window

    def of_rank(self, update: int, rank: int) -> Window:
        """Return the window of any rank; without shards of a model."""
        speeds = None if self.speeds is None else self.speeds.at(update)
        split = self._planner.assignment(update, speeds)
        return self._planner.window(update, rank, split)

    def cost(self, window: Window) -> float:
        """Return the cost of this rank's window."""
        return self._planner.cost(window)

    def epoch_of(self, update: int) -> int:
        return self._planner.order.epoch_of(update)


@dataclass(slots=True)
class TrainingProgress:
    """Progress of a training. `updates` and `samples` count from its beginning.

    Attributes:
        done: the last update of this attempt.
        recent_updates: it and those before it.
        stopped: all ranks agreed to stop, and what follows the last update is over.
        ended_early: evaluations have not improved for long enough, so no update follows.
        newcomers: the loop ended after it to let others in; only its record was written so far.
        evaluating: all ranks evaluate after it.
        work_s, wait_s: of this rank in its updates: all of them but the waiting for others.
        returned: this attempt went back to a checkpoint.
        recorded, evaluated: updates that this rank has recorded, and after which it evaluated.
    """

    updates: int = 0
    samples: int = 0
    loss: float = float("nan")
    evaluation: dict[str, float] = field(default_factory=dict[str, float])
    done: CompletedUpdate | None = None
    stopped: bool = False
    ended_early: bool = False
    returned: bool = False
    recorded: int = 0
    evaluated: int = 0
    newcomers: bool = False
    evaluating: bool = False
    work_s: float = 0.0
    wait_s: float = 0.0
    recent_updates: deque[CompletedUpdate] = field(
        default_factory=lambda: deque(maxlen=MOST_RECENT_UPDATES)
    )

    def add(self, done: CompletedUpdate) -> None:
        """Add a completed update."""
        self.done = done
        # Without indices and losses: a record needs neither, and many updates are kept.
        window = replace(done.window, micro_batches=(), order=None)
        report = replace(done.report, losses=())
        self.recent_updates.append(replace(done, window=window, report=report))
        self.updates, self.loss = done.window.update + 1, done.report.loss
        self.samples += done.window.samples
        self.wait_s += done.report.wait_s
        self.work_s += max(0.0, done.seconds - done.report.wait_s)

    def over(self, updates: int) -> bool:
        """Return whether no window follows: all `updates` are done, or all ranks agreed to stop."""
        stops = self.done is not None and self.done.report.stop_requested
        return self.updates >= updates or stops or self.ended_early

    def go_back(self) -> None:
        """Forget what came after the checkpoint that `updates` and `samples` are now of."""
        self.done, self.returned = None, True
        # The updates after it come again, so their lines and evaluations do, too.
        self.recorded = min(self.recorded, self.updates)
        self.evaluated = min(self.evaluated, self.updates)
        while self.recent_updates and self.recent_updates[-1].window.update >= self.updates:
            self.recent_updates.pop()


class Saving(Protocol):
    """The part of `CheckpointManager` that the loop needs on all ranks. All is collective."""

    def check_replicas(self) -> None: ...
    def collect(self, updates: int, samples: int) -> None: ...
    def complete_parts(self, *, wait: bool) -> None: ...


@dataclass(kw_only=True, slots=True)
class TrainingLoop:
    """The training loop of one rank in one group; iterate over it once. See the module.

    Attributes:
        updates: of the whole training.
        checkpoints: on all ranks; None: nothing is saved.
        progress: which the loop continues, in the next group after a loss too.
        checkpoint_every, evaluate_every: see `is_due`.
        checkpoint_soon: save after the next update as well, unless nothing is ever saved.
        evaluate: computes the held-out figures, on the rank that does.
        trained: for the callbacks' `on_start`.
        judge: says of an evaluation after so many updates whether it is the best so far, and
            whether it is time to stop. Collective; it gets the figures that this rank has.
    """

    windows: RankWindows
    updates: int
    checkpoints: Saving | None
    callbacks: Sequence[Callback]
    progress: TrainingProgress
    checkpoint_every: int | None
    evaluate_every: int | None = 0
    checkpoint_soon: bool = False
    evaluate: Callable[[], dict[str, float]] | None = None
    judge: Callable[[int, dict[str, float]], tuple[bool, bool]] | None = None
    trained: Trained = field(default_factory=Trained)
    _window: Window | None = None
    _began: float = 0.0
    _work: tuple[float, float] = (0.0, 0.0)

    def __iter__(self) -> Iterator[Window]:
        """Yield windows until all updates are done, or all ranks agree to stop, or to let newcomers
        in. What follows an update is collective.
        """
        progress = self.progress
        self._call("on_start", self.trained)
        # A new rank 0 writes those that the lost one did not; elsewhere `recorded` skips all.
        for done in progress.recent_updates:
            self._record(done)
        if progress.done is not None:  # a rank that is lost may have had no time for all of this
            self._follow_up(progress.done)
        elif progress.updates:  # the attempt before may have ended before this
            self._evaluate()
            self._judge()
        while progress.updates < self.updates and not (progress.stopped or progress.ended_early):
            self._began = time.perf_counter()
            # By `progress`, which the next group brings to where the most advanced rank is.
            window = self._window = self.windows.window(progress.updates)
            yield window
            done = progress.done
            if done is None or done.window.update != window.update:
                raise RuntimeError(f"update {window.update} was not ended by end_window()")
            # What is collective after the update is left to the next group, newcomers included.
            if done.report.newcomers and not progress.over(self.updates):
                progress.newcomers = True
                self._record(done)
                return
            # Perhaps collective, so here, where all ranks pass once an update.
            if self.windows.speeds is not None:
                seconds, cost = self._work
                self.windows.speeds.add(window.update, seconds=seconds, cost=cost)
            self._follow_up(done, soon=self.checkpoint_soon)
            self.checkpoint_soon = False

    def micro_batches(self, first: int) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches from update `first` on, for a loader that reads ahead."""
        for update in range(first, self.updates):
            yield from self.windows.window(update).micro_batches

    def begin_micro_step(self, window: Window, done: int) -> None:
        """Begin a micro-step of `window` after `done` of them; after all, its boundary."""
        self._call("on_micro_step", window.update, done, window.steps)

    def end_window(self, report: BoundaryReport, *, learning_rate: float | None = None) -> None:
        """End the window that was yielded last, right after its boundary.

        Args:
            learning_rate: of the update, where the plan does not know it.
        """
        window = self._window
        if window is None:
            raise RuntimeError("end_window() was called before the first window")
        seconds = time.perf_counter() - self._began  # without what follows it up
        if learning_rate is not None:
            window = replace(window, learning_rate=learning_rate)
        self.progress.add(CompletedUpdate(window, report, seconds))
        if self.windows.speeds is not None:
            # Reading data is work, too: a node may be slow for its disk.
            others = report.wait_s + report.optimizer_s + report.compile_s
            self._work = seconds - others, self.windows.cost(window)

    def wants_stop(self, update: int) -> bool:
        """Return whether a callback wants all ranks to stop after this update."""
        return any(self._call("wants_stop", update))

    def begin_held_out_piece(self, done: int) -> None:
        """Begin a piece of held-out data after `done` of this rank's, within `evaluate`."""
        self._call("on_held_out_piece", done)

    def _call(self, method: str, *values: Any) -> list[Any]:
        """Call a method of all callbacks and return their answers; an exception gets the name of
        the one that raised it.
        """
        answers: list[Any] = []
        for callback in self.callbacks:
            try:
                answers.append(getattr(callback, method)(*values))
            except Exception as error:
                # A note keeps the exception's class, by which callers tell a lost peer from a bug.
                error.add_note(CallbackNote(f"in the callback {type(callback).__name__}.{method}"))
                raise
        return answers

    def _record(self, done: CompletedUpdate) -> None:
        """Pass an update to the callbacks, once. Not collective."""
        if self.progress.recorded <= done.window.update:
            self._call("before_record")
            self._call("on_boundary", done)
            self.progress.recorded = done.window.update + 1

    def _follow_up(self, done: CompletedUpdate, *, soon: bool = False) -> None:
        """Record an update; evaluate and save where that is due. Collective.

        Called again after a loss, since some ranks may have done a part of it.
        """
        progress = self.progress
        self._record(done)
        last = progress.updates == self.updates
        # After the last update there is nothing to stop: the run ends as usual.
        leaving = done.report.stop_requested and not last
        due = self._is_due(self.checkpoint_every) or (soon and self.checkpoint_every != 0)
        if self.checkpoints is not None:
            # The checkpoint before this one, whose parts were written during the update.
            self.checkpoints.complete_parts(wait=last or leaving)
        saved = self.checkpoints if last or leaving or due else None
        if saved is not None:
            saved.check_replicas()  # ranks that disagree about the state must not save it
        # A stop has little time: the next start makes up for the evaluation (`__iter__`).
        if not leaving:
            self._evaluate()
            improved = self._judge()
            last = last or progress.ended_early
            if saved is None and self.checkpoints is not None and (improved or last):
                saved = self.checkpoints  # the best, or the last, that was not due otherwise
                saved.check_replicas()
        if saved is not None:
            saved.collect(progress.updates, progress.samples)
            # Again: while it evaluated or collected, the others may have continued without it.
            self._call("before_record")
            self._call("on_checkpoint", progress.updates, progress.samples)
            # Parts that no thread writes are there by now; others mostly at the next boundary.
            saved.complete_parts(wait=last or leaving)
        progress.stopped = leaving

    def _evaluate(self) -> None:
        """Evaluate after the last update, if that is due and this rank has not done it."""
        progress = self.progress
        if self.evaluate is None or progress.evaluated >= progress.updates or not self._evaluates():
            return
        with declared("it evaluates after update %d", progress.updates):
            progress.evaluation = self.evaluate()
        self._call("before_record")
        # The window of `done` is not there where an attempt begins with an evaluation.
        window = self.windows.window(progress.updates - 1)
        self._call("on_evaluation", window, dict(progress.evaluation))
        progress.evaluated = progress.updates

    def _evaluates(self) -> bool:
        """Return whether there is an evaluation after the last update."""
        return self.progress.updates == self.updates or self._is_due(self.evaluate_every)

    def _judge(self) -> bool:
        """Judge the evaluation after the last update, if there is one; return whether it is the
        best so far. Collective.
        """
        progress = self.progress
        # By what is equal on all ranks, since judging is collective: not by `evaluated`.
        if self.judge is None or not self._evaluates():
            return False
        improved, progress.ended_early = self.judge(progress.updates, progress.evaluation)
        return improved

    def _is_due(self, every: int | None) -> bool:
        done, epoch_of = self.progress.updates, self.windows.epoch_of
        # The update that completes an epoch may have samples of the next one.
        ends = done == self.updates or epoch_of(done) != epoch_of(done - 1)
        return is_due(every, done, epoch_ends=ends)


def is_due(every: int | None, done: int, *, epoch_ends: bool) -> bool:
    """Return whether to evaluate or save after `done` updates.

    Args:
        every: n updates; None: at the ends of epochs; 0: never.
    """
    return epoch_ends if every is None else bool(every) and done % every == 0


def update_line(done: CompletedUpdate, peak_memory_bytes: int) -> dict[str, Any]:
    """Return an update's line of metrics.jsonl."""
    # `_LINE` in replay/bisecting.py matches this order of keys; another order is still read, as
    # JSON, which takes ten times as long.
    window, report = done.window, done.report
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
        "update_s": round(done.seconds, 6),
        "gradient_norm": report.gradient_norm,
        **({"gradient_digest": report.gradient_digest} if report.gradient_digest else {}),
        "applied": report.applied,
        "loss_scale": report.loss_scale,
        "metrics": dict(report.metrics),
        "epoch": window.epoch,
        "learning_rate": window.learning_rate,
        "samples": window.samples,
        "micro_steps": window.steps,
        "peak_memory_bytes": peak_memory_bytes,
        **({"speeds": window.speeds} if window.speeds else {}),
    }
