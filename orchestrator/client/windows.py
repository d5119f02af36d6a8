"""`run.windows`: the samples that this rank computes in each update, one window after the other.

The loop is the user's; mistakes in it are found by counting (`MicroBatchTracker`). The record, a
checkpoint and the end follow when the loop asks for the next window, so after all that the user's
code does after `boundary()`, such as a scheduler's step.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.client.checkpoints import Saved
from orchestrator.client.loop import RankWindows, is_due, update_line
from orchestrator.client.options import (
    WindowOptions,
    decided_by,
    in_its_words,
    plan_of,
    whole_number,
)
from orchestrator.client.run import Run
from orchestrator.engine.api import BoundaryReport
from orchestrator.engine.api import Window as RankWindow
from orchestrator.engine.common.micro_steps import derived_seed
from orchestrator.engine.torch.accumulator import Accumulator, only_accumulator
from orchestrator.engine.torch.engine import peak_memory_bytes
from orchestrator.engine.torch.model import be_deterministic, seed_everything
from orchestrator.engine.torch.reproducible import Leaves
from orchestrator.engine.torch.start_checks import check_same_traits
from orchestrator.engine.torch.window_state import MicroBatchTracker
from orchestrator.errors import ConfigError, JobError
from orchestrator.plan.plan import Plan
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.warnings import warn, warn_into


class Window:
    """One update, for this rank. Iterate over it for the numbers of its micro-batches' samples.

    Attributes:
        update, epoch: their numbers, from 0.
        samples: of the update over all ranks.
    """

    def __init__(self, given: RankWindow, epoch: int, windows: Windows) -> None:
        self.update, self.epoch, self.samples = given.update, epoch, given.samples
        self._given, self._windows = given, windows

    def __len__(self) -> int:
        """Return the number of this rank's micro-batches, perhaps 0."""
        return len(self._given.micro_batches)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the numbers of each micro-batch's samples.

        Random numbers come from a seed that depends only on the update and the micro-batch's place
        in it.
        """
        for number, micro_batch in enumerate(self._given.micro_batches):
            self._windows.hand_out(self, number)
            seed = self._windows.seed
            seed_everything(derived_seed("step", seed, self.update, micro_batch.start))
            yield list(micro_batch.indices)
        self._windows.hand_out(self, len(self))


class Windows:
    """All windows of a training, on this rank; iterate over them once.

    Attributes:
        plan: assignment of samples to ranks and micro-steps.
        first: the update to begin with; earlier ones came from a checkpoint.
        seed: of the order and of random numbers.
        running: the loop has not ended.
        stopping: all ranks agreed to stop.
    """

    def __init__(
        self, run: Run, plan: Plan, accumulators: Sequence[Accumulator], options: WindowOptions,
        saved: Saved | None,
    ) -> None:  # fmt: skip
        self._run, self.plan, self._all, self._saved = run, plan, accumulators, saved
        self.seed, self.updates = options.seed, plan.updates or 0
        self.running, self.stopping, self._begun = True, False, False
        self._given = RankWindows(plan, accumulators[0].group.rank)
        reproducible = plan.modes.reduction == "reproducible"
        self._leaves = Leaves(plan.batch.micro_batch_cap if reproducible else None)
        self._checkpoint_every = options.checkpoint_every
        self._window: Window | None = None
        self._began = self._rate = 0.0
        self._parts = [MicroBatchTracker(self._asked_to_stop) for _ in accumulators]
        for one, part in zip(accumulators, self._parts, strict=True):
            one.track_windows(part)
        self.first, self._samples = saved.load() if saved is not None else (options.first or 0, 0)
        if self.first > self.updates:
            raise ConfigError(
                f"run.windows(): {self.first} updates are done, but updates={self.updates} were "
                f"asked for; updates={self.first} or more would do"
            )
        if accumulators[0].group.rank == 0:
            for sentence in plan.warnings:
                warn(in_its_words(sentence))

    def __len__(self) -> int:
        """Return how many windows come at the start of the loop."""
        return self.updates - self.first

    def indices(self) -> Iterator[list[int]]:
        """Yield this rank's micro-batches of all windows to come, in order: a `batch_sampler` for
        a DataLoader, which reads ahead.
        """
        for update in range(self.first, self.updates):
            for micro_batch in self._given.window(update).micro_batches:
                yield list(micro_batch.indices)

    def __iter__(self) -> Iterator[Window]:
        if self._begun:
            raise JobError(
                "the windows of run.windows() are one training, and were gone through already; "
                "all epochs are one loop: epochs=3, say"
            )
        self._begun = True
        return self._each()

    def _each(self) -> Iterator[Window]:
        whole = False
        try:
            for update in range(self.first, self.updates):
                yield self._begin(update)
                self._end(update)
                if self.stopping:
                    break
            whole = True
        finally:
            self._leave(whole=whole)
        if self._saved is not None:
            self._saved.require_saved()

    def _begin(self, update: int) -> Window:
        self._began = time.perf_counter()
        given = self._given.window(update)
        leaves = self._leaves.of_update(given.samples)
        mine = [self._leaves.leaf_of(one) for one in given.micro_batches]
        for one in self._all:
            one.begin_tracked(
                update,
                micro_batches=len(mine),
                # others' losses may be recorded, whose backward does not divide
                expected_weight=given.samples if len(self._all) == 1 else None,
                leaves=None if leaves is None else (leaves, [n for n in mine if n is not None]),
            )
        # Before a scheduler's step, which comes after the boundary.
        self._rate = float(self._all[0].optimizer.param_groups[0]["lr"])
        self._window = Window(given, self._given.epoch_of(update), self)
        return self._window

    def hand_out(self, window: Window, number: int) -> None:
        """Record that the loop takes micro-batch `number` of `window`, from 0.

        Raises:
            JobError: the one before was not computed, or the window is over.
        """
        if window is not self._window or not self.running:
            raise JobError(
                f"the window of update {window.update} is over; its micro-batches are not handed "
                "out any more"
            )
        computed = max(part.computed for part in self._parts)
        if computed < number:
            raise JobError(
                f"micro-batch {number} of {len(window)} of update {window.update} was taken, but "
                "not computed: no accumulator.backward() came for it, so its samples would be left "
                "out. Where they do not count, give them a weight of 0"
            )
        if number < len(window):
            for part in self._parts:
                part.taken = number + 1

    def _end(self, update: int) -> None:
        window = self._given.window(update)
        for part in self._parts:
            part.require_ended()
        reports = [part.report for part in self._parts if part.report is not None]
        self._samples += window.samples
        self._record(reports, window)
        last = update + 1 == self.updates
        self.stopping = any(report.stop_requested for report in reports) and not last
        if self.stopping:
            self._run.agreed_to_stop(update)
        ends = last or self._given.epoch_of(update + 1) != self._given.epoch_of(update)
        due = is_due(self._checkpoint_every, update + 1, epoch_ends=ends)
        if self._saved is not None and (due or last or self.stopping):
            self._run.flush()
            if self._saved.save(update + 1, self._samples):
                self._run.record({"saved": update, "update": update, "time": time.time()})

    def _record(self, reports: Sequence[BoundaryReport], window: RankWindow) -> None:
        """Record the first accumulator's report, and the others' losses as metrics."""
        line = update_line(reports[0], time.perf_counter() - self._began)
        others = {f"loss_{number}": one.loss for number, one in enumerate(reports) if number}
        self._run.record(
            {
                **line,
                "epoch": self._given.epoch_of(window.update),
                "samples": window.samples,
                "micro_steps": window.steps,
                "learning_rate": self._rate,
                "peak_memory_bytes": peak_memory_bytes(self._all[0].group.device),
                "collectives": sum(report.collectives for report in reports),
                "bytes_on_wire": sum(report.bytes_on_wire for report in reports),
                "metrics": line["metrics"] | others,
            }
        )

    def _asked_to_stop(self) -> bool:
        return self._saved is not None and self._run.asked_to_stop()

    def _leave(self, *, whole: bool) -> None:
        """Stop tracking windows; warn if the loop was left by `break`."""
        self.running = False
        within = [part.leave() for part in self._parts]
        error = sys.exc_info()[1]
        failed = getattr(sys, "last_value", None) or (error is not None and error.__context__)
        if whole or failed or not isinstance(error, GeneratorExit):
            return
        at = self._window.update if self._window is not None else self.first
        done = f"the loop over run.windows() was left after {at + (not any(within))} of "
        done += f"{self.updates} updates"
        if any(within):
            done += f", within update {at}: its micro-steps train nothing"
        warn(f"{done}; ranks that go on wait for this one, and nothing was saved after that")


def windows_of(run: Run, samples: int, accumulator: Any, given: Mapping[str, Any]) -> Windows:
    """Return the windows of a training; see `Run.windows`. Collective.

    Raises:
        ConfigError, TypeError: invalid options.
        JobError: options that differ between ranks.
    """
    options = WindowOptions.of(given)
    samples = whole_number("samples", samples, least=1)
    accumulators = _listed(accumulator)
    _check_group(run, accumulators)
    group, settings = accumulators[0].group, accumulators[0].options
    plan = plan_of(samples, options, ranks=group.size, reduction=settings.reduction)
    decided = decided_by(samples, options, plan)
    asked = {**decided, "updates": plan.updates, "steps": plan.batch.steps, "first": options.first}
    asked |= {name: getattr(options, name) for name in ("micro_batch", "checkpoint_every")}
    asked |= {"checkpoints": options.checkpoints is not None, "state": sorted(options.state)}
    if group.size > 1:
        check_same_traits(group, [(f"{n} of run.windows()", repr(v)) for n, v in asked.items()])
    if run:
        node = int(os.environ.get("GROUP_RANK", "0"))
        warn_into(RunDir(run.folder).warnings(run.attempt, node), group.rank)
    if settings.reduction == "reproducible":
        be_deterministic()
    saved = _saved(run, accumulators, options, decided)
    return Windows(run, plan, accumulators, options, saved)


def _listed(accumulator: Any) -> list[Accumulator]:
    if accumulator is None:
        accumulator = only_accumulator()
    given = list(accumulator) if isinstance(accumulator, (list, tuple)) else [accumulator]
    if not given or not all(isinstance(one, Accumulator) for one in given):
        raise ConfigError(
            "run.windows(len(data), accumulator): it must be an Accumulator, or a list of those "
            f"that share the windows, but is {accumulator!r:.60}"
        )
    return given


def _check_group(run: Run, accumulators: Sequence[Accumulator]) -> None:
    group = accumulators[0].group
    if any(one.group is not group and one.group.size != group.size for one in accumulators):
        raise ConfigError("accumulators that share windows must be of the same ranks")
    reductions = {one.options.reduction for one in accumulators}
    if len(reductions) > 1:
        raise ConfigError("accumulators that share windows must have the same reduction=")
    if run.ranks is not None and run.ranks != group.size:
        raise ConfigError(
            f"this run has {run.ranks} ranks, but the accumulator's group has {group.size}: each "
            "sample would be computed by several. Call init_process_group() before, and leave the "
            "group out, or give it TorchGroup.wrap(torch.distributed.group.WORLD)"
        )


def _saved(
    run: Run, accumulators: Sequence[Accumulator], options: WindowOptions, decided: dict[str, Any]
) -> Saved | None:
    folder = options.checkpoints
    if folder is None and (not run or options.first is not None):
        return None
    own = run.checkpoint_dir if folder is None else Path(folder)
    return Saved(
        own,
        accumulators,
        run=RunDir(run.folder).identity if run and folder is None else None,
        decided=decided,
        keep=options.keep_checkpoints,
        state=options.state,
    )
