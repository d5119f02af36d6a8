"""`run.windows`: the samples that this rank computes in each update, one window after the other.

The loop is the user's; mistakes in it are found by counting (`MicroBatchTracker`). The record, a
checkpoint and the end follow when the loop asks for the next window, so after all that the user's
code does after `boundary()`, such as a scheduler's step. See `client/loop.py`.
"""

from __future__ import annotations

import atexit
import sys
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from torch import Tensor
from torch.nn import Module, ModuleList
from torch.utils.data import default_collate

from orchestrator.client.arguments import whole_number
from orchestrator.client.balance import MeasuredSpeeds, RecordedSpeeds, Speeds, known_speed
from orchestrator.client.checkpoint_manager import CheckpointManager
from orchestrator.client.loop import (
    Callback,
    CompletedUpdate,
    RankWindows,
    Trained,
    TrainingLoop,
    TrainingProgress,
    configured_callbacks,
    update_line,
)
from orchestrator.client.options import (
    WindowOptions,
    as_options,
    decided_by,
    plan_of,
    recorded_speeds_of,
)
from orchestrator.client.run import CurrentRun
from orchestrator.config.reading import read_config
from orchestrator.engine.api import BoundaryReport
from orchestrator.engine.common import waiting
from orchestrator.engine.common.seeds import derived_seed
from orchestrator.engine.torch import loader
from orchestrator.engine.torch.accumulator import Accumulator, only_accumulator
from orchestrator.engine.torch.consistency_checks import (
    Trait,
    check_same_traits,
    versions,
)
from orchestrator.engine.torch.engine import peak_memory_bytes
from orchestrator.engine.torch.group import bytes_of, gather_numbers
from orchestrator.engine.torch.model import (
    be_deterministic,
    compiled_advice,
    kept_random_state,
    modes_of,
    seed_everything,
)
from orchestrator.engine.torch.state import Snapshot, load_model, load_optimizer, pack
from orchestrator.engine.torch.window_state import MicroBatchTracker, shown_error
from orchestrator.errors import ConfigError, JobError, RunFolderError
from orchestrator.plan.plan import Plan
from orchestrator.plan.recorded_speeds import SpeedChanges
from orchestrator.plan.window import Window
from orchestrator.rundir.environments import describe_environment, warnings_of
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.warnings import warn
from orchestrator.units import plural

READ_AHEAD = 16
"""Windows that a user's loader may ask for ahead of their turn, with balance="measured"."""


class UserWindow:
    """One update, for this rank. Iterate over it for the numbers of its micro-batches' samples.

    Attributes:
        update, epoch: their numbers, from 0.
        samples: of the update over all ranks.
    """

    def __init__(self, window: Window, windows: Windows) -> None:
        self.update, self.epoch, self.samples = window.update, window.epoch, window.samples
        self.planned, self._windows = window, windows

    def __len__(self) -> int:
        """Return the number of this rank's micro-batches, perhaps 0. Of a model that `fully_shard`
        has sharded some are perhaps padding, whose losses count nothing.
        """
        return len(self.planned.micro_batches)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the numbers of each micro-batch's samples.

        Random numbers come from a seed that depends only on the update and the micro-batch's
        position in it; before the first and after the last, only on the update.
        """
        for number, micro_batch in enumerate(self.planned.micro_batches):
            self._windows.hand_out(self, number)
            seed = self._windows.seed
            seed_everything(derived_seed("step", seed, self.update, micro_batch.start))
            yield list(micro_batch.indices)
        self._windows.hand_out(self, len(self))
        self._windows.seed_all_alike("end", self.update)


class _Once(Iterator[list[int]]):
    """An iterator that begins once: a DataLoader reads ahead of where it is."""

    def __init__(self, items: Iterator[list[int]]) -> None:
        self._items, self._begun = items, False

    def __iter__(self) -> Self:
        if self._begun:  # a DataLoader with workers takes two `iter`, and only then the first item
            raise JobError(
                "windows.indices() were gone through before, or by another DataLoader: take one "
                "iter() of the loader before the loop, and next() of it for each micro-batch"
            )
        return self

    def __next__(self) -> list[int]:
        self._begun = True
        return next(self._items)


def _keeping_random_state(batches: Generator[Any]) -> Generator[Any]:
    """Yield the batches. Random numbers drawn to read them change none of a micro-step's."""
    with closing(batches):
        while True:
            with kept_random_state():
                batch = next(batches, batches)
            if batch is batches:
                return
            yield batch


class Windows:
    """All windows of a training, on this rank; iterate over them once.

    Attributes:
        plan: assignment of samples to ranks and micro-steps.
        first: the update to begin with; earlier ones came from a checkpoint.
        saves: the loop keeps checkpoints.
        seed: of the order and of random numbers.
        running: the loop has not ended.
    """

    def __init__(
        self,
        run: CurrentRun,
        plan: Plan,
        accumulators: Sequence[Accumulator],
        options: WindowOptions,
        checkpoints: CheckpointManager | None,
        recorded_speeds: SpeedChanges,
    ) -> None:
        self.plan, self._all, self._checkpoints = plan, accumulators, checkpoints
        self._run = run
        self.seed, self.updates, rank = options.seed, plan.updates or 0, accumulators[0].group.rank
        self.running, self._begun, self.saves = True, False, checkpoints is not None
        self._reproducible = plan.reduction == "reproducible"
        self._window: UserWindow | None = None

        def is_stop_requested() -> bool:
            asked = (checkpoints is not None or bool(run)) and run.is_stop_requested()
            update = None if self._window is None else self._window.update
            return asked or (update is not None and self._loop.wants_stop(update))

        # All refusals that need no checkpoint come before the restore, and the accumulators are
        # taken last: a corrected call may follow a refusal.
        for accumulator in accumulators:
            accumulator.refuse_tracked()
        copies = {a.fully_sharded.shard_ranks for a in accumulators if a.fully_sharded}
        if len(copies) > 1:
            raise ConfigError("models that share windows must be sharded over the same ranks")
        if options.balance != "even" and copies:
            raise ConfigError(
                f"balance={options.balance!r} is not available with a model that fully_shard() has "
                "sharded: ranks of a copy compute in step; leave it out"
            )
        configured = _configured_callbacks(run)
        self.first, samples = options.first or 0, 0
        if checkpoints is not None:
            self.first, samples = checkpoints.restore(rank) or (0, 0)
        if self.first > self.updates:
            raise ConfigError(
                f"run.windows(): {self.first} updates are done, but updates={self.updates} were "
                f"asked for; updates={self.first} or more would do"
            )
        if rank == 0:
            for sentence in plan.warnings:
                warn(as_options(sentence))
        record: list[Callback] = [RunRecord(run, self.updates, accumulators[0].group.device)]
        if checkpoints is not None and rank == 0:
            record.append(checkpoints)
        speeds: Speeds | None = None
        group = accumulators[0].group
        if recorded_speeds:
            speeds = RecordedSpeeds(recorded_speeds)
        elif options.balance == "measured" and group.size > 1:
            speeds = MeasuredSpeeds.begin(
                rank,
                self.first,
                READ_AHEAD,
                lambda numbers: gather_numbers(group, numbers),
                known=checkpoints and known_speed(checkpoints.speeds, rank),
            )
            speeds.setting = "balance='measured'"
            if checkpoints is not None:
                checkpoints.speeds = speeds.rows
        self._loop = TrainingLoop(
            windows=RankWindows(plan, rank, shard_ranks=next(iter(copies), ()), speeds=speeds),
            updates=self.updates,
            checkpoints=checkpoints,
            callbacks=[*record, *options.callbacks, *configured],
            progress=TrainingProgress(updates=self.first, samples=samples),
            checkpoint_every=options.checkpoint_every,
            trained=Trained(gradients=self._gradients),
        )
        self._trackers = [MicroBatchTracker(is_stop_requested) for _ in accumulators]
        for accumulator, tracker in zip(accumulators, self._trackers, strict=True):
            accumulator.track_windows(tracker)

    def _gradients(self) -> dict[str, Tensor]:
        """Return the gradients of all accumulators by name; see `ShowsGradients`."""
        if len(self._all) == 1:
            return self._all[0].gradients()
        each = enumerate(self._all)
        return {
            f"{n}.{name}": g
            for n, accumulator in each
            for name, g in accumulator.gradients().items()
        }

    def __len__(self) -> int:
        """Return how many windows come at the start of the loop."""
        return self.updates - self.first

    @property
    def stopping(self) -> bool:
        """Return whether all ranks agreed to stop."""
        return self._loop.progress.stopped

    def indices(self) -> Iterator[list[int]]:
        """Return the indices of this rank's micro-batches of all windows, in order: a
        `batch_sampler` for a DataLoader of your own. See also `batches`.

        Raises:
            JobError: the loop has begun, or (by another `iter` of it, or of a DataLoader) they are
                gone through twice: what workers have read ahead would be lost.
        """
        self._refuse_late("indices()")
        return _Once(
            list(micro_batch.indices) for micro_batch in self._loop.micro_batches(self.first)
        )

    def batches(
        self,
        dataset: Any,
        *,
        workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        augments: bool = False,
        pin_memory: bool = False,
    ) -> Iterator[Any]:
        """Yield the batch of each of this rank's micro-batches of all windows, in order.

        Args:
            dataset: anything with `len()` and `[index]`.
            workers: processes that read ahead.
            collate: makes a batch of a list of samples; by default torch's.
            augments: `dataset[i]` draws random numbers: they depend on the update and the sample's
                position in it, not on the process that reads it.

        Raises:
            JobError: the loop has begun, or the data set cannot be read.
        """
        self._refuse_late("batches()")
        job = SimpleNamespace(augments=augments, collate=collate or default_collate)
        loader_batches = loader.batches(
            self._loop.micro_batches(self.first),
            dataset=dataset,
            job=job,
            seed=self.seed,
            workers=workers,
            pin_memory=pin_memory,
            context=None,  # a spawned one would run a script without `__main__` once more
        )
        # Before multiprocessing's own, which waits for workers that ignore its SIGTERM.
        atexit.register(loader_batches.close)
        return _keeping_random_state(loader_batches)

    def _refuse_late(self, call: str) -> None:
        if self._begun:
            raise JobError(
                f"windows.{call} came after the loop had begun, and would begin with its first "
                "micro-batch again: call it once before the loop, and take next() of it for each "
                "micro-batch"
            )

    def seed_all_alike(self, when: str, update: int) -> None:
        """Seed what the loop draws outside of micro-steps: the same numbers on all ranks."""
        seed_everything(derived_seed(when, self.seed, update))

    def __iter__(self) -> Iterator[UserWindow]:
        if self._begun:
            raise JobError(
                "the windows of run.windows() are one training, and were gone through already; "
                "all epochs are one loop: epochs=3, say"
            )
        self._begun = True
        return self._each()

    def _each(self) -> Iterator[UserWindow]:
        whole = applied = False
        shown_before = shown_error()
        # The first call sets the handlers of signals, which from now on wait for a boundary.
        self._trackers[0].stop_requested()
        try:
            for window in self._loop:
                self._window = self._begin(window)
                # Before a scheduler's step, which comes after the boundary.
                rate = float(self._all[0].optimizer.param_groups[0].get("lr") or 0.0)
                self.seed_all_alike("window", window.update)
                yield self._window
                report = self._report()
                applied = applied or report.applied
                self._loop.end_window(report, learning_rate=rate)
            whole = True
        finally:
            self._leave(whole=whole, failed=shown_error() != shown_before)
        if self._checkpoints is not None and self._checkpoints.unsaved is not None:
            raise RunFolderError(f"{self._checkpoints.unsaved}; make room, and go on")
        if len(self) and not (applied or self.first or self.stopping):
            raise JobError(
                f"none of {plural(len(self), 'update')} was applied, so the weights are those of "
                "the beginning: each had a loss or gradient that is not finite "
                "(on_non_finite='skip', or float16), or nothing in it counted (a weight of 0)"
            )

    def _begin(self, window: Window) -> UserWindow:
        self._run.set_update(window.update, window.epoch)
        for accumulator in self._all:
            accumulator.begin_tracked(
                window.update,
                # others' losses may be recorded, whose backward does not divide
                expected_weight=window.samples if len(self._all) == 1 else None,
                leaves=window.micro_step_count if self._reproducible else None,
                own_leaves=[
                    micro_batch.number if self._reproducible else None
                    for micro_batch in window.micro_batches
                ],
            )
        return UserWindow(window, self)

    def hand_out(self, window: UserWindow, number: int) -> None:
        """Record that the loop takes micro-batch `number` of `window`, from 0.

        Raises:
            JobError: the one before was not computed, or the window is over.
        """
        if window is not self._window or not self.running:
            raise JobError(
                f"the window of update {window.update} is over; its micro-batches are not handed "
                "out any more"
            )
        computed = max(tracker.computed for tracker in self._trackers)
        if computed < number:
            raise JobError(
                f"micro-batch {number} of {len(window)} of update {window.update} was taken, but "
                "not computed: no accumulator.backward() came for it, so its samples would be left "
                "out. Where they do not count, give them a weight of 0"
            )
        if number < len(window):
            for accumulator, tracker in zip(self._all, self._trackers, strict=True):
                tracker.taken = number + 1
                tracker.samples = len(window.planned.micro_batches[number].indices)
                accumulator.padding = number >= len(window) - window.planned.padding
        self._loop.begin_micro_step(window.planned, number)

    def _report(self) -> BoundaryReport:
        """Return the first accumulator's report, with the others' losses as metrics, and the
        traffic of all.
        """
        for tracker in self._trackers:
            tracker.require_ended()
        reports = [tracker.report for tracker in self._trackers if tracker.report is not None]
        digests = [report.gradient_digest for report in reports if report.gradient_digest]
        others = {f"loss_{number}": report.loss for number, report in enumerate(reports) if number}
        return replace(
            reports[0],
            metrics={**reports[0].metrics, **others},
            gradient_digest="-".join(digests) or None,
            stop_requested=any(report.stop_requested for report in reports),
            collectives=sum(report.collectives for report in reports),
            bytes_on_wire=sum(report.bytes_on_wire for report in reports),
        )

    def _leave(self, *, whole: bool, failed: bool) -> None:
        """Stop tracking windows; warn if the loop was left by `break`.

        Args:
            failed: an error of the loop was shown before this generator was closed.
        """
        self.running = False
        self._run.release_signals()
        within = [tracker.leave() for tracker in self._trackers]
        error = sys.exc_info()[1]
        if whole or failed or not isinstance(error, GeneratorExit) or error.__context__:
            return
        at = self._window.update if self._window is not None else self.first
        done = f"the loop over run.windows() was left after {at + (not any(within))} of "
        done += f"{self.updates} updates"
        if any(within):
            done += f", within update {at}: its micro-steps train nothing"
        warn(f"{done}; ranks that go on wait for this one, and nothing was saved after that")


def _configured_callbacks(run: CurrentRun) -> list[Callback]:
    """Return the callbacks that `run.callbacks` names; none outside any run."""
    folder = RunDir(run.folder)
    if not (run and folder.config.exists()):
        return []
    return configured_callbacks(read_config(folder.read_config()).run.callbacks)


class RunRecord(Callback):
    """The record of a user's own loop in its run; nothing without one."""

    def __init__(self, run: CurrentRun, updates: int, device: Any) -> None:
        self._run, self._updates, self._device = run, updates, device

    def on_boundary(self, done: CompletedUpdate) -> None:
        self._run.record(update_line(done, peak_memory_bytes(self._device)))
        if done.report.stop_requested and done.window.update + 1 < self._updates:
            self._run.agreed_to_stop(done.window.update)


class AccumulatorState:
    """The state of accumulators that share windows, and of further objects of the user.

    Args:
        decided: options that must not change; see `decided_by`.
        others: further objects with `state_dict`, by name.

    Raises:
        ConfigError: an accumulator has parameters in the place of a module.
        JobError: a state cannot be saved.
    """

    def __init__(
        self,
        accumulators: Sequence[Accumulator],
        decided: Mapping[str, Any],
        others: Mapping[str, Any],
    ) -> None:
        self._all, self._decided, self._others = accumulators, dict(decided), others
        self._group = accumulators[0].group
        self._optimizers: list[dict[str, Any] | None] = []
        modules = [
            accumulator.model
            for accumulator in accumulators
            if isinstance(accumulator.model, Module)
        ]
        if len(modules) < len(accumulators):
            raise ConfigError(
                "checkpoints need the torch.nn.Module itself: build the Accumulator with it, not "
                "with its parameters; or keep your own checkpoints, and say first="
            )
        self._model = modules[0] if len(modules) == 1 else ModuleList(modules)
        self._modes = modes_of(self._model)
        in_shards = any(accumulator.fully_sharded is not None for accumulator in accumulators)
        if in_shards and any(accumulator.options.shard_optimizer for accumulator in accumulators):
            raise ConfigError(
                "a model that fully_shard() has sharded and one with shard_optimizer cannot share "
                "checkpoints: leave shard_optimizer out"
            )
        self._check_others(in_shards=in_shards)
        self._warned_of_scheduler = False
        self._warn_of_lost_scheduler()

    def _warn_of_lost_scheduler(self) -> None:
        """Warn once, on rank 0, of a learning-rate scheduler that no checkpoint would hold."""
        groups = (group for own in self._all for group in own.optimizer.param_groups)
        if self._warned_of_scheduler or not any("initial_lr" in group for group in groups):
            return
        # One may be a part of an object that saves several.
        parts = [
            part
            for own in self._others.values()
            for part in (own, *getattr(own, "__dict__", {}).values())
        ]
        if self._group.rank != 0 or any(hasattr(part, "get_last_lr") for part in parts):
            return
        self._warned_of_scheduler = True
        warn(
            "a learning-rate scheduler sets the optimizer's rates, but state= of run.windows() has "
            "none, so after a stop its schedule would begin again: add it, as in "
            "state={'rate': scheduler}"
        )

    def _pack_others(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the further state, packed, and its tensors by their paths. Raises `JobError`."""
        tensors: dict[str, Tensor] = {}
        packed = {
            n: pack(own.state_dict(), tensors, f"state {n}") for n, own in self._others.items()
        }
        return packed, tensors

    def _check_others(self, *, in_shards: bool) -> None:
        """Refuse further state that cannot be saved, now rather than at the first checkpoint, or
        that differs between ranks, and that rank 0's would replace at the next start. Collective.
        """
        packed, tensors = self._pack_others()
        if in_shards:  # they differ
            return
        digest = zlib.crc32(repr(packed).encode())
        for tensor in tensors.values():
            digest = zlib.crc32(bytes_of(tensor.cpu()).numpy().data, digest)
        if len({row[0] for row in self.gather([float(digest)])}) > 1:
            raise JobError(
                f"state= ({', '.join(self._others)}) differs between ranks, but rank 0's is saved "
                "and given to all of them: keep there only what is the same on all ranks"
            )

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        return gather_numbers(self._group, numbers)

    def check_replicas(self) -> None:
        for accumulator in self._all:
            accumulator.check_replicas()

    def gather_state(self) -> None:
        self._optimizers = [accumulator.optimizer_state() for accumulator in self._all]

    def holds_state(self) -> bool:
        return not any(accumulator.sharded for accumulator in self._all)

    def part(self) -> int | None:
        return next(
            (
                accumulator.fully_sharded.part
                for accumulator in self._all
                if accumulator.fully_sharded
            ),
            None,
        )

    def save_state(self, folder: Path) -> dict[str, Any]:
        """Write the state that was gathered into `folder`, or this rank's part of it; see
        `rundir.checkpoints.Saves`.
        """
        self._warn_of_lost_scheduler()  # perhaps built after run.windows() was called
        states, part = self._optimizers, self.part()
        self._optimizers = []
        if part is not None:
            states = [accumulator.optimizer.state_dict() for accumulator in self._all]
        parts = {f"optimizer {n}": state for n, state in enumerate(states)}
        parts |= {f"state {name}": own.state_dict() for name, own in self._others.items()}
        extra = {
            "precision": [accumulator.precision.state() for accumulator in self._all],
            "state": list(self._others),
            "windows": self._decided,
            "modes": self._modes.changes(),
        }
        return Snapshot(self._model, parts, extra, part=part).save_state(folder)

    def load_state(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """Load what `save_state` wrote. Not collective.

        Raises:
            ConfigError: it was made with another batch, order or number of accumulators.
        """
        before = extra.get("windows") or {}
        for name, now in self._decided.items():
            if name in before and before[name] != now:
                raise ConfigError(
                    f"run.windows(): {name} is {now}, but this training began with {before[name]}, "
                    f"and {folder} was reached with that: its samples would come in another order. "
                    f"Go on with {before[name]}, or begin another one elsewhere"
                )
        if sorted(extra.get("state", ())) != sorted(self._others):
            raise ConfigError(
                f"run.windows(): {folder} was saved with state of "
                f"{', '.join(extra.get('state', ())) or 'nothing'}, but state= has "
                f"{', '.join(self._others) or 'nothing'}"
            )
        if len(extra["precision"]) != len(self._all):
            raise ConfigError(
                f"run.windows(): {folder} is of {len(extra['precision'])} accumulators, but "
                f"{len(self._all)} share these windows"
            )
        load_model(self._model, folder, extra["model"])
        optimizers = {
            f"optimizer {n}": accumulator.optimizer for n, accumulator in enumerate(self._all)
        }

        def restore(saved: dict[str, Any]) -> None:
            for number, accumulator in enumerate(self._all):
                accumulator.load_optimizer_state(saved[f"optimizer {number}"])
            for name, part in self._others.items():
                try:
                    part.load_state_dict(saved[f"state {name}"])
                except (ValueError, KeyError, RuntimeError) as error:
                    raise RunFolderError(
                        f"state[{name!r}] does not take what {folder} holds of it: "
                        f"{type(error).__name__}: {error}"
                    ) from error

        load_optimizer(folder, extra["optimizer"], restore, optimizers, self._pack_others()[1])
        for accumulator, precision in zip(self._all, extra["precision"], strict=True):
            accumulator.precision.load(precision)
        self._modes.apply(extra["modes"])


def windows_of(
    run: CurrentRun, samples: int, accumulator: Any, arguments: Mapping[str, Any]
) -> Windows:
    """Return the windows of a training; see `CurrentRun.windows`. Collective.

    Raises:
        ConfigError, TypeError: invalid options.
        JobError: options that differ between ranks.
    """
    options = WindowOptions.of(arguments)
    samples = whole_number("windows", "samples", samples, 1, ConfigError)
    accumulators = _find_accumulators(run, accumulator)
    group, settings = accumulators[0].group, accumulators[0].options
    plan = plan_of(
        samples,
        options,
        ranks=group.size,
        reduction=settings.reduction,
        in_step=any(accumulator.fully_sharded for accumulator in accumulators),
    )
    decided = decided_by(samples, options, plan)
    traits = {**decided, "updates": plan.updates, "steps": plan.batch.steps, "first": options.first}
    alike = ("micro_batch", "micro_tokens", "pad_to", "balance", "checkpoint_every")
    traits |= {name: getattr(options, name) for name in alike}
    traits["cost (its digest)"] = plan.work and plan.work.cost_digest
    recorded_speeds = recorded_speeds_of(options, group.size)
    traits["the recorded speeds (their digest)"] = zlib.crc32(repr(recorded_speeds).encode())
    traits |= {"checkpoints": options.checkpoints is not None, "state": sorted(options.state)}
    if group.size > 1:
        named = [Trait(f"{name} of run.windows()", repr(v)) for name, v in traits.items()]
        check_same_traits(group, named)
    if run:
        waiting.call_at_changes(lambda: run.declare(waiting.declared_activity()))
    if settings.reduction == "reproducible":
        be_deterministic()
        models = [accumulator.model for accumulator in accumulators]
        sentences = [s for m in models if isinstance(m, Module) for s in compiled_advice(m)]
        for sentence in sentences if group.rank == 0 else ():
            warn(sentence)
    if run and group.rank == 0:
        _record_environment(RunDir(run.folder), group.transport)
    checkpoints = None
    if options.checkpoints is not None or (run and options.first is None):
        state = AccumulatorState(accumulators, decided, options.state)
        own = options.checkpoints
        folder = run.checkpoint_dir if own is None else Path(own)
        if group.rank == 0 and own is not None:  # a run has had its own from its beginning
            folder.mkdir(parents=True, exist_ok=True)

        def note(updates: int) -> None:
            run.record({"saved": updates - 1, "update": updates - 1, "time": time.time()})

        checkpoints = CheckpointManager(
            folder,
            state,
            run=RunDir(run.folder).identity if run and own is None else None,
            keep=options.keep_checkpoints,
            keep_every=options.keep_every,
            on_written=note,
        )
    return Windows(run, plan, accumulators, options, checkpoints, recorded_speeds)


def _record_environment(run: RunDir, transport: str) -> None:
    """Write environment.json, but for the code's commit, and warn of what differs from before."""
    environment = describe_environment(versions(), transport, {})
    for sentence in warnings_of(environment, run):
        warn(sentence)
    try:
        write_json(run.environment, environment)
    except OSError as error:  # a full disk, which does not end a program
        warn(f"{run.environment} could not be written ({error}), so no resume compares with it")


def _find_accumulators(run: CurrentRun, accumulator: Any) -> list[Accumulator]:
    """Return the accumulators that share the windows. Raises `ConfigError` if they cannot."""
    if accumulator is None:
        accumulator = only_accumulator()
    accumulators = list(accumulator) if isinstance(accumulator, (list, tuple)) else [accumulator]
    if not accumulators or not all(isinstance(item, Accumulator) for item in accumulators):
        raise ConfigError(
            "run.windows(len(data), accumulator): it must be an Accumulator, or a list of those "
            f"that share the windows, but is {accumulator!r:.60}"
        )
    group = accumulators[0].group
    if any(member.group.size != group.size for member in accumulators):
        raise ConfigError("accumulators that share windows must be of the same ranks")
    if len({member.options.reduction for member in accumulators}) > 1:
        raise ConfigError("accumulators that share windows must have the same reduction=")
    if run.ranks is not None and run.ranks != group.size:
        raise ConfigError(
            f"this run has {run.ranks} ranks, but the accumulator's group has {group.size}: each "
            "sample would be computed by several. Call init_process_group() before, and leave the "
            "group out, or give it TorchGroup.wrap(torch.distributed.group.WORLD)"
        )
    return accumulators
